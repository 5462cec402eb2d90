// What the page knows, and how it learns of news.

const POLL = 1000;
const MOST_COMPARED = 6;

const state = {
  now: 0,
  runs: [],
  /** Whether the server takes orders for runs. */
  orders: false,
  problems: [],
  /** Names of the runs that are compared, and of the one whose details are shown. */
  compared: new Set(memory.get("compared", [])),
  detail: memory.get("detail", ""),
  hasChosen: memory.get("compared", []).length > 0,
};

/** An answer of the server. `how` is for requests that are no simple GET. */
async function ask(path, query = {}, how = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) if (one !== undefined && one !== null) search.append(name, one);
  }
  const answer = await fetch(`${path}?${search}`, { credentials: "same-origin", cache: "no-store", signal: AbortSignal.timeout(30_000), ...how });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new Error(told.error ?? `the server says ${answer.status}`);
  }
  return answer.json();
}

/** The colour of a run: it stays the same while the list does. */
function runColor(id) {
  const index = state.runs.findIndex((run) => run.id === id);
  return color(`--run-${((index < 0 ? 0 : index) % 8) + 1}`);
}

const detailRun = () => state.runs.find((run) => run.id === state.detail);
const comparedRuns = () => state.runs.filter((run) => state.compared.has(run.id));

/** What changes when a run writes or is asked. */
const stampOf = (run) => [run.step, run.changed, run.loss, run.val_loss, run.samples, run.events].join(" ");

/** Curves of a run. Those of a run without news are not asked for again. */
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

/** Chooses what is shown at first, and lets go of what is gone. */
function settleChoice() {
  // A server that has just begun has not read its folders yet: the choice stays.
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

/** Asks for the runs again and again, and calls `tell` with each answer, or with why there is none. */
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
    // Nobody sees a page in the background.
    setTimeout(turn, document.hidden ? 5 * POLL : POLL);
  };
  turn();
}
