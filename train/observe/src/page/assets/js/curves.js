// Any metric over the steps, for several runs at once.

/** The metrics drawn initially, and other possible ones. */
const FIRST = ["loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s", "wait_s", "peak_bytes", "answer_loss"];

const curveOptions = {
  axis: memory.get("axis", "step"),
  isLogX: false,
  isLogY: memory.get("logY", false),
  smoothing: memory.get("smoothing", 0),
  range: null,
  more: new Set(memory.get("more", [])),
};

function curvesView() {
  const charts = new Map();
  const grid = h("section", { class: "charts", "aria-label": "Curves" });
  const reset = h("button", { type: "button", hidden: true, onclick: () => zoom(null) }, "Show all steps");
  const found = h("datalist", { id: "keys" });
  const search = h("input", { type: "search", id: "key", placeholder: "layers.3.…", autocomplete: "off", onchange: add });
  search.setAttribute("list", "keys");
  const redraw = debounced(() => refresh(), 60);
  const controls = h("form", { class: "controls panel", onsubmit: (event) => { event.preventDefault(); add(); } },
    h("label", null, "Horizontal axis", h("select", { onchange: (event) => { curveOptions.axis = event.target.value; memory.set("axis", curveOptions.axis); zoom(null); } },
      Object.entries(AXES).map(([key, { name }]) => h("option", { value: key, selected: key === curveOptions.axis }, name)))),
    h("label", null, "Smoothing", h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: curveOptions.smoothing,
      oninput: (event) => { curveOptions.smoothing = Number(event.target.value); memory.set("smoothing", curveOptions.smoothing); redraw(); } })),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: curveOptions.isLogY, onchange: (event) => { curveOptions.isLogY = event.target.checked; memory.set("logY", curveOptions.isLogY); refresh(); } }), "Logarithmic values"),
    h("label", { class: "check" }, h("input", { type: "checkbox", checked: curveOptions.isLogX, onchange: (event) => { curveOptions.isLogX = event.target.checked; refresh(); } }), "Logarithmic axis"),
    h("label", null, "Another metric", search, found), h("button", null, "Add"), reset);
  const hint = h("p", { class: "quiet" }, "Drag over a chart to zoom in. Where a point stands for many steps, a pale band spans their smallest and largest values. "
    + "Signs below the curves: ▲ start or resume, ● checkpoint, ✕ skipped step, ■ end, stop or failure. Point at one to read it.");
  const root = h("div", { class: "view" }, controls, hint, grid);
  let known_keys = "";

  function zoom(range) {
    curveOptions.range = range && range[1] > range[0] ? range : null;
    reset.hidden = !curveOptions.range;
    refresh();
  }

  function add() {
    const key = search.value.trim();
    if (!key) return;
    curveOptions.more.add(key);
    memory.set("more", [...curveOptions.more]);
    search.value = "";
    refresh();
  }

  function chartOf(key) {
    if (charts.has(key)) return charts.get(key);
    const chart = new Chart({ title: metricName(key), format: metricFormat(key), onzoom: (from, to) => zoom([from, to]) });
    if (!FIRST.includes(key)) {
      const drop = () => { curveOptions.more.delete(key); memory.set("more", [...curveOptions.more]); chart.remove(); chart.element.remove(); charts.delete(key); };
      chart.element.querySelector("figcaption").append(h("button", { type: "button", class: "small", onclick: drop, "aria-label": `Remove ${key}` }, "Remove"));
    }
    charts.set(key, chart);
    grid.append(chart.element);
    return chart;
  }

  async function refresh() {
    const compared = comparedRuns();
    const { axis, isLogX, isLogY, smoothing, range, more } = curveOptions;
    const key = [...FIRST, ...more];
    const query = { key, over: AXES[axis].over, from: range?.[0], to: range?.[1], points: 800, log: isLogX ? 1 : undefined };
    const [answers, events] = await Promise.all([Promise.all(compared.map((run) => seriesOf(run, query))), Promise.all(compared.map(eventsOf))]);
    for (const one of key) {
      const lines = compared.map((run, i) => ({ name: run.id, ...lookOf(run.id), data: answers[i].series[one], events: events[i].events, began: run.began, points: one === "val_loss" || one === "answer_loss" }));
      if (!lines.some((line) => line.data) && !more.has(one)) {
        charts.get(one)?.element.setAttribute("hidden", "");
        continue;
      }
      const chart = chartOf(one);
      chart.element.removeAttribute("hidden");
      chart.set(lines, { isZoomed: Boolean(range), axis, isLogX, isLogY, smoothing: one === "lr" ? 0 : smoothing, theme: theme(),
        nothing: compared.length ? "None of these runs has this metric." : "Select a run above." });
    }
  }

  async function update() {
    const run = detailRun();
    await refresh();
    if (!run || known_keys === run.id) return;
    known_keys = run.id;
    const { keys } = await ask("/api/keys", { run: run.id });
    fill(found, keys.filter((key) => !FIRST.includes(key) && key !== "time").map((key) => h("option", { value: key }, metricName(key))));
  }

  return { root, update, remove: () => charts.forEach((chart) => chart.remove()) };
}
