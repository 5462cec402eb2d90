// The page's data, and how it is updated.

const POLL = 1000;
/** Runs compared initially: a report compares those that its author named. */
const MOST_COMPARED = report ? Infinity : 6;

const state = {
  now: 0,
  runs: [],
  /** True if the server accepts orders for runs. */
  orders: false,
  problems: [],
  /** Names of the compared runs, and of the run whose details are shown. */
  compared: new Set(memory.get("compared", [])),
  detail: memory.get("detail", ""),
  hasChosen: memory.get("compared", []).length > 0,
};

/** Fetches an answer from the server, or from the report. `how`: options for requests other than a simple GET. */
async function ask(path, query = {}, how = {}) {
  if (report) return inReport(path, query);
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== undefined && one !== null) search.append(name, one);
  }
  const answer = await fetch(`${path}?${search}`, { credentials: "same-origin", cache: "no-store", signal: AbortSignal.timeout(30_000), ...how });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Error(told.error ?? `the server returned status ${answer.status}`);
  }
  return answer.json();
}

/** Returns an answer from the report. It may cover more runs than requested. */
function inReport(path, query) {
  const answer = report.answers[path] ?? report.runs[query.run][path];
  if (path !== "/api/series") return answer;
  const series = {}, { from = 0, to = Infinity } = query;
  for (const key of [query.key].flat()) {
    const curve = answer.series[key];
    if (!curve) continue;
    const { steps, ...axes } = answer.axes[curve.axis];
    const kept = steps.map((step, i) => (from <= step && step <= to ? i : -1)).filter((i) => i >= 0);
    const pick = (values) => values && kept.map((i) => values[i]);
    const last = to === Infinity ? curve.last : [kept.map((i) => steps[i]).at(-1), curve.mean[kept.at(-1)]];
    series[key] = { last, steps: pick(steps), mean: pick(curve.mean), low: pick(curve.low), high: pick(curve.high), over: pick(axes[query.over]) };
  }
  return { run: query.run, last_step: answer.last_step, series };
}

/** With more runs, they can be searched, and the overview shows fewer curves of each. */
const MANY_RUNS = 8;

/** Dash patterns of curves: they distinguish as many runs of the same colour. */
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

/** The style of a curve and its key in legends, by its place in a list. */
function styleOf(index) {
  const dash = Math.floor(index / 8) % DASHES.length;
  return { color: color(`--run-${(index % 8) + 1}`), dash: DASHES[dash], key: dash ? `key dash-${dash}` : "key" };
}

/** The style of a run: constant while the list of runs is unchanged. */
const lookOf = (id) => styleOf(Math.max(0, state.runs.findIndex((run) => run.id === id)));

const runColor = (id) => lookOf(id).color;
const keyOf = ({ color, key }) => h("span", { class: key, style: { "--key": color } });

const detailRun = () => state.runs.find((run) => run.id === state.detail);
const comparedRuns = () => state.runs.filter((run) => state.compared.has(run.id));

/** The compared runs in a query. Without a name, the server answers for all runs, which may not fit an address. */
const comparedNames = () => (state.compared.size === state.runs.length ? [] : comparedRuns().map((run) => run.id));

/** A value that changes whenever a run writes or is asked. */
const stampOf = (run) => [run.step, run.changed, run.loss, run.val_loss, run.samples, run.events].join(" ");

/** Curves of a run. They are fetched again only if the run has changed. */
const curves = new Map();
async function seriesOf(run, query) {
  const name = run.id + JSON.stringify(query);
  const stamp = stampOf(run);
  const had = curves.get(name);
  if (had?.stamp === stamp) return had.answer;
  const answer = await ask("/api/series", { run: run.id, ...query });
  if (curves.size > 200) curves.clear();
  curves.set(name, { stamp, answer });
  return answer;
}

/** Events of a run, fetched again only if there are new ones. */
const happened = new Map();
async function eventsOf(run) {
  const had = happened.get(run.id);
  if (had?.count === run.events) return had.answer;
  const answer = await ask("/api/events", { run: run.id });
  happened.set(run.id, { count: run.events, answer });
  return answer;
}

/** Chooses the initially shown runs, and drops runs that no longer exist. */
function settleChoice() {
  // A server that has just started has not read its folders yet: keep the choice.
  if (!state.runs.length) return;
  const ids = new Set(state.runs.map((run) => run.id));
  const had = state.compared.size;
  for (const id of state.compared) if (!ids.has(id)) state.compared.delete(id);
  const byNews = [...state.runs].sort((a, b) => a.is_over - b.is_over || (b.changed ?? 0) - (a.changed ?? 0));
  if (state.compared.size === 0 && (had > 0 || !state.hasChosen || state.runs.length === 1)) {
    for (const run of byNews.slice(0, MOST_COMPARED)) state.compared.add(run.id);
  }
  if (!ids.has(state.detail)) state.detail = byNews[0]?.id ?? "";
}

function keepChoice() {
  state.hasChosen = true;
  memory.set("compared", [...state.compared]);
  memory.set("detail", state.detail);
}

/** Polls the runs (once in a report), and calls `tell` with each answer, or with the reason for its absence. */
function poll(tell) {
  const turn = async () => {
    try {
      const answer = await ask("/api/runs");
      Object.assign(state, { now: answer.now, runs: answer.runs, orders: answer.orders, problems: answer.problems });
      settleChoice();
      await tell(null);
    } catch (error) {
      await tell(error);
    }
    // A page in the background is not visible.
    if (!report) setTimeout(turn, document.hidden ? 5 * POLL : POLL);
  };
  turn();
}
