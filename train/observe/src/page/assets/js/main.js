// Selects the view, and holds the parts common to all views.

const VIEWS = {
  overview: ["Overview", overview], curves: ["Curves", curvesView], ranks: ["Ranks", ranksView], timeline: ["Timeline", timelineView],
  memory: ["Memory", memoryView], results: ["Results", resultsView], configuration: ["Configuration", configView], text: ["Text", samplesView], events: ["Events", eventsView],
};

// A report has the views that it has data for.
if (report) {
  const some = (path, has) => Object.values(report.runs ?? {}).some((run) => has(run[path]));
  if (report.answers["/api/strategies"]) {
    for (const name of Object.keys(VIEWS)) delete VIEWS[name];
    VIEWS.strategies = ["Strategies", strategiesView];
  }
  if (!some("/api/look", ({ look }) => look?.ranks.length)) delete VIEWS.ranks;
  if (!some("/api/timeline", ({ ranks }) => ranks.length)) ["timeline", "memory"].forEach((name) => delete VIEWS[name]);
}

const byId = (id) => document.getElementById(id);
let view = null, viewName = "", isUpdating = false, isStale = false, pickerShape = "";

/** The current colours, by name. */
function theme() {
  const chosen = memory.get("theme", "");
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function setTheme() {
  document.documentElement.dataset.theme = theme();
  pickerShape = "";
  changed();
}

/** Shows the view named in the address. */
function route() {
  if (location.hash && !location.hash.startsWith("#/")) return;
  const name = location.hash.slice(2);
  const next = name in VIEWS ? name : Object.keys(VIEWS)[0];
  if (next === viewName) return;
  view?.remove?.();
  const isFirst = viewName === "";
  viewName = next;
  view = VIEWS[next][1]();
  fill(byId("main"), view.root);
  document.title = `${VIEWS[next][0]} · Kiln`;
  for (const link of byId("views").querySelectorAll("a")) {
    if (link.hash === `#/${next}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!isFirst) byId("main").focus({ preventScroll: true });
  changed();
}

/** Updates the view. Requests during an update cause a single further update. */
async function changed() {
  showPicker();
  if (!view || (!report && !state.runs.length && !state.problems.length)) return;
  if (isUpdating) return void (isStale = true);
  isUpdating = true;
  try {
    await view.update();
    if (!window.kilnReady) window.kilnReady = performance.now();
  } catch (error) {
    showConnection(error);
  }
  isUpdating = false;
  if (isStale) {
    isStale = false;
    await changed();
  }
}

function chooseDetail(id) {
  state.detail = id;
  keepChoice();
  changed();
}

const chips = h("div", { class: "chips" });
const detail = h("label", { class: "detail" });
const sought = h("input", { type: "search", "aria-label": "Show the runs whose names match a regular expression", placeholder: "name or regex", oninput: () => seek() });
const tools = h("span", { class: "tools" }, sought, [["All", true], ["None", false]].map(([name, is]) =>
  h("button", { type: "button", class: "small", "aria-label": `Compare ${name.toLowerCase()} of the listed runs`, onclick: () => chooseListed(is) }, name)));
fill(byId("picker"), h("fieldset", null, h("legend", null, "Compare"), tools, chips), detail);

/** True for names that match the search box. What is no regular expression yet is searched as text. */
function isSought(name) {
  const text = sought.value.trim();
  try {
    return new RegExp(text, "i").test(name);
  } catch {
    return name.includes(text);
  }
}

function seek() {
  for (const chip of chips.children) chip.hidden = !tools.hidden && !isSought(chip.dataset.run);
}

function chooseListed(is) {
  for (const { id } of state.runs.filter((run) => isSought(run.id))) state.compared[is ? "add" : "delete"](id);
  keepChoice();
  changed();
}

/** The compared runs, and the run whose details are shown. */
function showPicker() {
  const shape = JSON.stringify([state.runs.map((run) => [run.id, run.state]), [...state.compared], state.detail, theme()]);
  if (shape === pickerShape) return;
  const focused = document.activeElement?.id;
  pickerShape = shape;
  const compare = (run) => h("label", { class: "chip", "data-run": run.id }, h("input", { type: "checkbox", id: `compare-${run.id}`, checked: state.compared.has(run.id), onchange: (event) => {
    if (event.target.checked) state.compared.add(run.id);
    else state.compared.delete(run.id);
    keepChoice();
    changed();
  } }), keyOf(lookOf(run.id)), h("span", null, breakable(run.id)));
  byId("picker").hidden = state.runs.length < 2;
  tools.hidden = state.runs.length <= MANY_RUNS;
  fill(chips, state.runs.map(compare));
  seek();
  fill(detail, "Details of ", h("select", { id: "detail", onchange: (event) => chooseDetail(event.target.value) },
    state.runs.map((run) => h("option", { value: run.id, selected: run.id === state.detail }, run.id))));
  if (focused) byId(focused)?.focus();
}

function showConnection(error) {
  const at = byId("connection");
  at.classList.toggle("lost", Boolean(error));
  const live = state.runs.filter((run) => !run.is_over && run.state).length;
  if (report) setText(at, error ? `This report is damaged: ${error.message}` : `Report by kiln ${report.program}`);
  else setText(at, error ? `No answer: ${error.message}` : `${plural(state.runs.length, "run")}, ${live} live`);
}

// Keep the token out of the history: the browser already has a cookie.
if (location.search && !report) history.replaceState(null, "", location.pathname + location.hash);

fill(byId("views"), Object.entries(VIEWS).map(([key, [name]]) => h("a", { href: `#/${key}` }, name)));
byId("theme").value = memory.get("theme", "");
byId("theme").addEventListener("change", (event) => { memory.set("theme", event.target.value); setTheme(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", setTheme);
addEventListener("hashchange", route);
setTheme();
route();
if (viewName === "strategies") showConnection(null);
else poll((error) => {
  showConnection(error);
  if (!error && !state.runs.length) fill(byId("main"), noticesOf(null) ?? h("p", { class: "quiet" }, "There is no run yet. A run appears here as soon as its folder exists."));
  else if (!error && view && !view.root.isConnected) fill(byId("main"), view.root);
  return changed();
});
