#!/bin/sh
# Installs the peers' packages into target/peers: PyTorch, which includes gloo and torchrun, numpy, and
# transformers and PEFT.
#
#     benches/peers/setup.sh
#
# PYTHON is the interpreter of the environment (default python3, 3.10 or newer).
set -eu

case "${1:-}" in
-h | --help)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
esac

cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m venv target/peers
target/peers/bin/pip install --quiet --disable-pip-version-check \
    torch==2.15.0 numpy==2.4.6 transformers==5.23.0 peft==0.21.2
target/peers/bin/python -c 'import torch, transformers
print("torch", torch.__version__)
print("transformers", transformers.__version__)'
echo "done; the scripts in benches/peers use target/peers/bin/python unless PEER_PYTHON names another"
