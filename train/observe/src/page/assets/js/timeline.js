// The last step that most ranks have reported, drawn to scale.

const OPERATIONS = { all_gather: "--gather", reduce_scatter: "--reduce", all_reduce: "--reduce" };

function timelineView() {
  const note = h("p", { class: "quiet" });
  const title = h("h2", null, "The last step");
  const canvas = h("canvas", { tabindex: "0", role: "img" });
  const told = h("p", { class: "told", role: "status" }, "Point at a span, or use the arrow keys.");
  const holder = h("div", { class: "canvas" }, canvas);
  const button = (text, label, act) => h("button", { type: "button", class: "small", "aria-label": label, onclick: act }, text);
  const tools = h("div", { class: "tools" }, button("+", "Zoom in", () => zoomBy(0.5)), button("−", "Zoom out", () => zoomBy(2)), button("All", "Show the whole step", () => show(null)));
  const sums = new Table("Time of the step by rank", [
    { name: "Rank", isNumber: true, cell: (r) => r.rank, value: (r) => r.rank },
    { name: "Machine", cell: (r) => r.node, value: (r) => r.node },
    ...["data", "forward", "backward", "optimizer", "other", "waiting"].map((key) => ({ name: SPENT[key][0].replace(" for other ranks", ""), isNumber: true, downFirst: true,
      cell: (r) => format.microseconds(r.sums[key] ?? 0), value: (r) => r.sums[key] ?? 0 })),
    { name: "Step", isNumber: true, downFirst: true, cell: (r) => format.microseconds(r.end - r.start), value: (r) => r.end - r.start },
  ]);
  const drawn = h("div", null, h("section", { class: "panel" }, h("div", { class: "headed" }, title, tools), timelineLegend(), holder, told),
    h("section", { class: "panel" }, h("h2", null, "Sums"), sums.element));
  const root = h("div", { class: "view" }, note, drawn);
  let data = null, range = null, at = null, dragged = null;

  const layout = () => {
    const width = holder.clientWidth, count = data?.ranks.length ?? 0;
    const row = count > 32 ? 13 : count > 8 ? 20 : 40;
    return { width, left: 34, top: 4, row, height: count * row + 30, gap: count > 32 ? 2 : 5 };
  };
  const ends = () => range ?? [0, data.length];
  const scale = () => {
    const { width, left } = layout(), [from, to] = ends(), factor = (width - left - 6) / Math.max(1, to - from);
    return { x: (time) => left + (time - from) * factor, time: (x) => from + (x - left) / factor };
  };

  function draw() {
    if (!data || !holder.clientWidth) return;
    const { width, left, top, row, height, gap } = layout(), { x } = scale(), [from, to] = ends();
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    const colors = new Map();
    const paint = (name) => colors.get(name) ?? colors.set(name, color(name)).get(name);
    pen.textBaseline = "middle";
    pen.fillStyle = paint("--muted");
    const bottom = height - 26, step = ROUND.find((step) => step * (width - left) >= 75 * (to - from));
    const marks = Array.from({ length: Math.floor(to / step) - Math.ceil(from / step) + 1 }, (_, i) => (Math.ceil(from / step) + i) * step / 1e6);
    labels(marks, step / 1e6, format.seconds).forEach((text, i) => {
      const at = x(marks[i] * 1e6);
      pen.textAlign = at < left + 20 ? "left" : at > width - 30 ? "right" : "center";
      pen.fillText(text, at, height - 10);
    });
    data.ranks.forEach((rank, index) => {
      const y = top + index * row, work = Math.round((row - gap) * 0.68), calls = row - gap - work;
      pen.textAlign = "right";
      pen.fillStyle = paint("--muted");
      if (row >= 12 && (row > 13 || index % 2 === 0)) pen.fillText(String(rank.rank), left - 6, y + (row - gap) / 2);
      pen.save();
      pen.beginPath();
      pen.rect(left, 0, width - left, bottom);
      pen.clip();
      const box = (start, end, key, offset, size) => {
        if (end < from || start > to) return;
        pen.fillStyle = paint(key);
        const begin = x(start);
        pen.fillRect(begin, y + offset, Math.max(0.6, x(end) - begin - (x(end) - begin > 3 ? 0.6 : 0)), size);
      };
      rank.spans.forEach((span) => box(span[2], span[3], span[5] >= 0 ? "--waiting" : activityColor(data.names[span[0]]), 0, work));
      rank.calls.forEach((call) => box(call[3], call[4], OPERATIONS[data.names[call[0]]] ?? "--other", work + 1, Math.max(1.5, calls - 1)));
      if (at && at.index === index) {
        const [start, end] = at.isCall ? at.span.slice(3, 5) : at.span.slice(2, 4);
        pen.strokeStyle = paint("--ink");
        pen.lineWidth = 1.5;
        pen.strokeRect(x(start), at.isCall ? y + work + 0.5 : y + 0.5, Math.max(2, x(end) - x(start)), at.isCall ? calls : work);
      }
      pen.restore();
    });
    if (dragged && Math.abs(dragged.to - dragged.from) > 3) {
      pen.fillStyle = `${paint("--accent")}33`;
      pen.fillRect(Math.min(dragged.from, dragged.to), 0, Math.abs(dragged.to - dragged.from), bottom);
    }
  }

  function tell(found) {
    at = found;
    if (found) {
      const { rank, span, isCall } = found, name = (i) => data.names[i];
      const [start, end] = isCall ? span.slice(3, 5) : span.slice(2, 4);
      const when = `${format.microseconds(end - start)}, from ${format.microseconds(start)} to ${format.microseconds(end)}`;
      const what = isCall ? `${name(span[0]).replaceAll("_", " ")} of ${name(span[1])} (${name(span[2])}), ${format.bytes(span[5])} sent`
        : span[5] >= 0 ? `waits for ${name(span[5]).replaceAll("_", " ")}, in ${name(span[0])}` : `${name(span[0])}${span[1] >= 0 ? ` of ${name(span[1])}` : ""}`;
      setText(told, `Rank ${rank.rank}: ${what}. ${when}.${!isCall && span[4] ? ` Holds ${format.bytes(span[4])}.` : ""}`);
    }
    draw();
  }

  /** The span at a position on the canvas. */
  function find(x, y) {
    const { top, row, gap } = layout(), time = scale().time(x), index = Math.floor((y - top) / row);
    const rank = data?.ranks[index];
    if (!rank) return null;
    const isCall = y - top - index * row > Math.round((row - gap) * 0.68);
    const list = isCall ? rank.calls : rank.spans, begin = isCall ? 3 : 2;
    const place = list.findIndex((span) => span[begin] <= time && time <= span[begin + 1]);
    return place < 0 ? null : { rank, index, place, span: list[place], isCall };
  }

  function show(wanted) {
    if (!data) return;
    range = wanted && wanted[1] - wanted[0] > 20 ? [Math.max(0, wanted[0]), Math.min(data.length, wanted[1])] : null;
    draw();
  }

  function zoomBy(factor) {
    if (!data) return;
    const [from, to] = ends(), middle = at ? (at.isCall ? at.span[3] : at.span[2]) : (from + to) / 2, half = ((to - from) * factor) / 2;
    show(half * 2 >= data.length ? null : [middle - half, middle + half]);
  }

  const local = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("pointerdown", (event) => { dragged = { from: local(event)[0], to: local(event)[0] }; });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = local(event);
    if (dragged && event.buttons) dragged.to = x;
    const found = find(x, y);
    if (found || dragged) tell(found ?? at);
  });
  canvas.addEventListener("pointerup", () => {
    const { time } = scale(), drag = dragged;
    dragged = null;
    if (drag && Math.abs(drag.to - drag.from) > 6) show([time(Math.min(drag.from, drag.to)), time(Math.max(drag.from, drag.to))]);
    else draw();
  });
  canvas.addEventListener("dblclick", () => show(null));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "+" || event.key === "-") return zoomBy(event.key === "+" ? 0.5 : 2);
    if (event.key === "Escape") return show(null);
    if (!data?.ranks.length || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const now = at && !at.isCall ? at : { index: 0, place: -1 };
    const index = Math.min(data.ranks.length - 1, Math.max(0, now.index + { ArrowUp: -1, ArrowDown: 1 }[event.key] || now.index));
    const spans = data.ranks[index].spans;
    const place = Math.min(spans.length - 1, Math.max(0, now.place + ({ ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0)));
    if (spans[place]) tell({ rank: data.ranks[index], index, place, span: spans[place], isCall: false });
  });
  const resized = new ResizeObserver(draw);
  resized.observe(holder);

  async function update() {
    const run = detailRun();
    // A step that the user is inspecting is kept, unless another run is chosen.
    if (!run || (data?.run === run.id && (range || document.activeElement === canvas))) return void draw();
    const answer = await ask("/api/timeline", { run: run.id });
    drawn.hidden = Boolean(answer.problem);
    setText(note, answer.problem ? `${run.id} has no timeline: ${answer.problem}.` : `Above: activities of each rank's thread. Below: its collectives. Drag to zoom in, double-click to show the whole step. ${sentence(answer.note)}`.trim());
    if (data?.run !== answer.run) range = null;
    data = answer.problem ? null : answer;
    if (!data) return;
    at = null;
    setText(title, `${run.id}, step ${format.count(data.step)}: ${format.microseconds(data.length)}`);
    canvas.setAttribute("aria-label", `Activities of ${plural(data.ranks.length, "rank")} in step ${data.step}. Arrow keys move between spans and ranks. A table of the sums follows.`);
    for (const rank of data.ranks) rank.sums = sumsOf(rank, data.names);
    sums.set(data.ranks);
    draw();
  }
  return { root, update, remove: () => resized.disconnect() };
}

/** Microseconds of a rank by activity. */
function sumsOf(rank, names) {
  const sums = {};
  for (const [activity, , start, end, , waits] of rank.spans) {
    const name = names[activity], known = ["data", "forward", "backward", "optimizer"].find((begin) => name.startsWith(begin));
    const key = waits >= 0 ? "waiting" : known ?? "other";
    sums[key] = (sums[key] ?? 0) + end - start;
  }
  return sums;
}

function timelineLegend() {
  const entry = (name, key) => h("li", null, h("span", { class: "key square", style: { "--key": `var(${key})` } }), name);
  return h("ul", { class: "legend" }, entry("Data", "--data"), entry("Forward", "--forward"), entry("Backward", "--backward"), entry("Optimizer", "--optimizer"),
    entry("Other", "--other"), entry("Waiting", "--waiting"), entry("Gathers", "--gather"), entry("Reductions", "--reduce"));
}
