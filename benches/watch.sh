#!/usr/bin/env bash
# Shows a run of four processes with `kiln watch` in tmux, at 80x24 and at 200x60, and saves the screens:
#
#     benches/watch.sh [FOLDER]        # docs/img/watch-80x24.txt and docs/img/watch-200x60.txt by default
#
# Checks that every view shows its contents within the screen, and that leaving restores the terminal. Needs tmux and
# the binary (cargo build --release). KILN_WATCH is the command that watches (default `kiln watch`), KILN_SET are
# further settings of the run, such as "optim.lr=1e-3".
set -euo pipefail
cd "$(dirname "$0")/.."
kiln=$(realpath -m "${KILN:-${CARGO_TARGET_DIR:-target}/release/kiln}")
watch=${KILN_WATCH:-$kiln watch}
images=${1:-docs/img}
command -v tmux >/dev/null || { echo "tmux is not installed: apt-get install tmux" >&2; exit 2; }
[ -x "$kiln" ] || { echo "$kiln is not built: cargo build --release" >&2; exit 2; }
mkdir -p "$images"
out=$(mktemp -d)
settings=()
for setting in ${KILN_SET:-}; do settings+=(--set "$setting"); done
"$kiln" launch --nproc-per-node 4 -- train configs/quickstart.toml --out "$out/quickstart" \
    --set data.path="$out/data" --set train.steps=3000 --set device.threads=1 --set train.micro_batch=2 \
    --set model.d_model=64 --set model.layers=2 --set model.heads=4 --set model.d_ff=128 \
    --set optim.warmup_steps=20 --set eval.every=25 --set eval.samples=8 --set checkpoint.every=100 \
    --set log.every=1 --set sample.every=100 \
    --set 'sample.prompts=["fn main"]' --set sample.max_tokens=48 "${settings[@]}" >"$out/log" 2>&1 &
launcher=$!
terminal() { tmux -L "kiln-watch-$$" -f /dev/null "$@"; }
trap 'terminal kill-server 2>/dev/null || true; kill -KILL $launcher 2>/dev/null; wait 2>/dev/null; rm -rf "$out"' EXIT

fail() {
    echo "$1" >&2
    screen >&2
    exit 1
}

# Prints the screen of the terminal.
screen() { terminal capture-pane -p -t watch; }

# Waits until the screen shows a text.
shows() {
    for _ in $(seq 600); do
        if screen | grep -qF -- "$1"; then return; fi
        sleep 0.1
    done
    fail "the screen does not show: $1"
}

# Long enough for curves to have a shape.
until grep -q '"step":300' "$out/quickstart/metrics.jsonl" 2>/dev/null; do
    kill -0 $launcher || { cat "$out/log" >&2; exit 1; }
    sleep 0.5
done

for size in 80x24 200x60; do
    width=${size%x*} height=${size#*x}
    terminal new-session -d -s watch -x "$width" -y "$height" "env -u NO_COLOR LC_ALL=C.UTF-8 bash --norc"
    terminal send-keys -t watch "stty -a >$out/before; $watch $out/quickstart; stty -a >$out/after; echo en\"\"ded" Enter
    shows "4 ranks"
    # CPU time is measured between two looks.
    sleep 2.5
    screen >"$images/watch-$size.txt"
    [ "$(LC_ALL=C.UTF-8 wc -L <"$images/watch-$size.txt")" -le "$width" ] || fail "a line is too long"
    [ "$(wc -l <"$images/watch-$size.txt")" -eq "$height" ] || fail "there are not $height lines"
    for view in "2:val_loss" "3:rank 0 " "4:output of all ranks" "5:sample" "6:1 of 1 runs shown"; do
        terminal send-keys -t watch "${view%%:*}"
        shows "${view#*:}"
    done
    terminal send-keys -t watch "?"
    shows "Shift-Tab"
    terminal send-keys -t watch "x"
    # Suspend and continue, as in any shell.
    terminal send-keys -t watch C-z
    shows "Stopped"
    terminal send-keys -t watch "fg" Enter
    shows "1 of 1 runs shown"
    terminal send-keys -t watch "q"
    shows "ended"
    cmp "$out/before" "$out/after" || fail "the terminal is not as it was"
    terminal kill-session -t watch
    echo "$images/watch-$size.txt"
done
