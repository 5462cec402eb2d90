// The ranks of a run at this moment.

const ACTIVITIES = [
  ["data", "--data"], ["forward", "--forward"], ["backward", "--backward"], ["optimizer", "--optimizer"], ["checkpoint", "--gather"],
];

/** The colour of an activity, by the word that begins it. */
function activityColor(name) {
  const found = ACTIVITIES.find(([begin]) => (name ?? "").startsWith(begin));
  return found ? found[1] : "--other";
}

const callName = (call) => (call ? `${call.operation.replaceAll("_", " ")} ${call.module}`.trim() : NONE);
const doingFor = (rank) => rank.pending?.seconds ?? rank.activity?.seconds;

function ranksView() {
  const said = h("div", { class: "panel" });
  const map = h("div", { class: "map", "aria-hidden": "true" });
  const hosts = new Map();
  let most = 1;
  const table = new Table("Ranks", [
    { name: "Rank", isNumber: true, cell: (r) => r.rank, value: (r) => r.rank },
    { name: "Machine", cell: (r) => hosts.get(r.rank) ?? NONE, value: (r) => hosts.get(r.rank) },
    { name: "Step", isNumber: true, cell: (r) => format.count(r.step), value: (r) => r.step },
    { name: "Doing", class: "doing", cell: (r) => doing(r), value: (r) => r.silent ?? r.activity?.name },
    { name: "Collective", cell: (r) => callName(r.pending), value: (r) => (r.pending ? callName(r.pending) : null) },
    { name: "For", isNumber: true, downFirst: true, cell: (r) => format.seconds(doingFor(r)), value: doingFor },
    { name: "Waits for", cell: (r) => (r.waits_for.length ? `rank ${r.waits_for.join(", ")}` : NONE), value: (r) => r.waits_for[0] },
    { name: "Memory now", isNumber: true, downFirst: true, cell: (r) => meter(format.bytes(r.bytes), (r.bytes ?? 0) / most), value: (r) => r.bytes },
    { name: "Peak memory", isNumber: true, downFirst: true, cell: (r) => format.bytes(r.peak_bytes), value: (r) => r.peak_bytes },
  ], { rowClass: (r) => (r.silent ? "silent" : culprits.has(r.rank) ? "culprit" : null) });
  let culprits = new Set();
  const lists = h("div", null, h("section", { class: "panel" }, h("h2", null, "Activity of each rank"), map, activityLegend()), h("section", { class: "panel" }, table.element));
  const root = h("div", { class: "view" }, said, lists);

  function doing(rank) {
    if (rank.silent) return rank.silent;
    return h("span", null, h("span", { class: "key square", style: { "--key": `var(${activityColor(rank.activity?.name)})` } }), rank.activity?.name ?? NONE);
  }

  async function update() {
    const run = detailRun();
    if (!run) return void fill(said, h("p", { class: "quiet" }, "There is no run yet."));
    const { look, problem } = await ask("/api/look", { run: run.id });
    const ranks = look?.ranks ?? [];
    culprits = new Set(look?.culprits ?? []);
    fill(said, h("h2", null, `${run.id} `, badge(look?.state)), h("p", null, sentence(look?.text ?? problem ?? "its processes are being asked")),
      culprits.size ? h("p", null, h("b", null, "Start with "), `rank ${[...culprits].join(", ")}.`) : null,
      !ranks.length ? h("p", { class: "quiet" }, run.is_over ? "The run has ended, so it has no ranks." : "No rank has answered yet.") : null);
    lists.hidden = ranks.length === 0;
    hosts.clear();
    for (const process of look?.processes ?? []) for (const rank of process.ranks) hosts.set(rank, process.host);
    most = Math.max(1, ...ranks.map((r) => Math.max(r.peak_bytes ?? 0, r.bytes ?? 0)));
    fill(map, ranks.map((r) => h("span", {
      class: ["rank", r.silent && "silent", r.pending && "waits", culprits.has(r.rank) && "culprit"].filter(Boolean).join(" "),
      style: { "--key": `var(${r.silent ? "--line" : activityColor(r.activity?.name)})` },
      title: `Rank ${r.rank}: ${r.silent ?? r.activity?.name ?? ""}${r.pending ? `, in ${callName(r.pending)} for ${format.seconds(r.pending.seconds)}` : ""}`,
    }, r.rank)));
    table.set(ranks);
  }
  return { root, update };
}

function activityLegend() {
  const entry = (name, key, kind = "key square") => h("li", null, h("span", { class: kind, style: { "--key": `var(${key})` } }), name);
  return h("ul", { class: "legend" }, entry("Data", "--data"), entry("Forward", "--forward"), entry("Backward", "--backward"), entry("Optimizer", "--optimizer"),
    entry("Other", "--other"), entry("Pale: waits in a collective", "--forward", "key square pale"), entry("Outlined: start here", "--bad", "key square outlined"));
}
