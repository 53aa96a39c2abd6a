"use strict";
// The browser of completions: filters, the list, a group side by side, one prompt through training.
(function (R) {
  const PAGE = 50;
  const RANGES = [["step", "Step"], ["reward", "Reward"], ["advantage", "Advantage"], ["num_tokens", "Length"]];
  let list = null, detail = null, rows = [], at = -1, asked = 0;

  const state = () => R.state.completions;
  const info = () => R.state.runs[state().run] || R.state.runs[0];

  // -- filters

  function range(name, label) {
    const input = (end) => R.el("input", { type: "number", step: "any", name: `${name}_${end}`, "aria-label": `${label}, ${end === "min" ? "at least" : "at most"}`,
      placeholder: end === "min" ? "from" : "to", value: state().query[`${name}_${end}`] || "" });
    return R.el("fieldset", {}, R.el("legend", {}, label), input("min"), input("max"));
  }

  function choice(name, label, options, chosen) {
    return R.el("label", {}, `${label} `, R.el("select", { name },
      ...options.map(([value, text]) => R.el("option", { value, selected: value === chosen }, R.visible(text)))));
  }

  function filters() {
    const { query } = state(), run = info();
    const columns = [...RANGES.map(([n, l]) => [n, l.toLowerCase()]), ...run.scores.map((s) => [`score:${s}`, s])];
    const sorts = columns.flatMap(([n, l]) => [[`-${n}`, `${l}, highest first`], [n, `${l}, lowest first`]]);
    const form = R.el("form", { class: "bar filters", id: "filters" },
      R.el("label", { class: "grow" }, "Text ", R.el("input", { type: "search", name: "text", id: "search", placeholder: "exact, in completions (/)", value: query.text || "" })),
      ...(R.state.runs.length > 1 ? [choice("run", "Run", R.state.runs.map((r) => [String(r.run), r.name]), String(run.run))] : []),
      choice("mode", "Of", [["", "all"], ...run.modes.map((m) => [m, m])], query.mode),
      choice("stop_reason", "Ended by", [["", "anything"], ...run.stop_reasons.map((s) => [s, s])], query.stop_reason),
      R.el("details", { class: "more", open: innerWidth > 640 }, R.el("summary", {}, "Ranges"), R.el("div", { class: "bar" },
        ...RANGES.map(([n, l]) => range(n, l)), ...run.scores.map((s) => range(`score:${s}`, R.visible(s))),
        R.el("label", {}, R.el("input", { type: "checkbox", name: "tokens", checked: Boolean(query.tokens) }), " with values of tokens"))),
      choice("sort", "Sort by", sorts, query.sort), R.el("button", { type: "reset" }, "Clear"));
    let typed = 0;
    const take = () => {
      const given = Object.fromEntries(new FormData(form));
      if (given.run) { const other = given.run !== String(state().run); state().run = Number(given.run); if (other) { state().query = { sort: "-step" }; R.render(); return; } }
      delete given.run;
      if (given.tokens) given.tokens = 1;
      state().query = { ...given, prompt: state().query.prompt };
      state().offset = 0;
      ask();
    };
    form.addEventListener("submit", (event) => { event.preventDefault(); take(); });
    form.addEventListener("change", take);
    form.addEventListener("input", (event) => { if (event.target.name === "text") { clearTimeout(typed); typed = setTimeout(take, 120); } });
    form.addEventListener("reset", () => { state().query = { sort: "-step" }; state().offset = 0; setTimeout(R.render); });
    return form;
  }

  // -- the list

  async function ask(quietly) {
    const mine = ++asked, began = performance.now();
    let found;
    try { found = await R.source.rows(info().run, { ...state().query, offset: state().offset, limit: PAGE }); }
    catch (error) { if (mine === asked) list.replaceChildren(R.el("p", { class: "error" }, error.message)); return; }
    if (mine !== asked || !list.isConnected) return;
    // A long search goes on: its later rows, or their number, are asked for until it is done. The server waits for it
    // before it answers.
    if (found.searched < 1) { if (found.final) count(mine, began); else setTimeout(() => { if (mine === asked && list.isConnected) ask(true); }, 20); }
    if (quietly && JSON.stringify(found.rows) === JSON.stringify(rows)) { tell(found, began); return; }
    const key = at >= 0 && rows[at] ? rows[at].id : null;
    rows = found.rows;
    list.replaceChildren(...rows.map(line));
    at = Math.max(-1, rows.findIndex((row) => row.id === key));
    mark();
    tell(found, began);
  }

  // The rows are final: reading and sending them again would only keep the search from going on.
  async function count(mine, began) {
    let found;
    try { found = await R.source.rows(info().run, { ...state().query, limit: 0 }); }
    catch { if (mine === asked && list.isConnected) ask(true); return; }
    if (mine !== asked || !list.isConnected) return;
    tell({ ...found, final: true }, began);
    if (found.searched < 1) setTimeout(() => { if (mine === asked && list.isConnected) count(mine, began); }, 20);
  }

  function tell(found, began) {
    const from = state().offset + 1, to = state().offset + rows.length;
    const parts = [`${R.number(found.count)} of ${R.number(found.of)} completions`];
    if (rows.length && found.count > rows.length) parts.push(`${from}–${to} shown`);
    if (found.searched < 1) parts.push(`${found.final ? "counting on" : "searching"}, ${Math.floor(100 * found.searched)}%`);
    if (found.share < 1) parts.push(`older ones are being read, ${Math.floor(100 * found.share)}%`);
    if (!R.source.live) parts.push(`a sample of the run's ${R.number(info().rows)}`);
    const words = document.getElementById("found");
    words.textContent = parts.join("; ");
    words.dataset.count = found.count;
    words.dataset.milliseconds = (performance.now() - began).toFixed(1);
    words.dataset.asked = asked;
    words.dataset.final = found.final;
    words.dataset.searched = found.searched;
    document.getElementById("before").disabled = state().offset === 0;
    document.getElementById("after").disabled = to >= found.count;
  }

  function line(row, place) {
    const cell = (name, value) => R.el("span", { class: `cell ${name}`, "data-label": name }, value);
    return R.el("div", { class: "row", role: "option", "aria-selected": "false", "data-id": row.id, onclick: () => { choose(place); open(); } },
      cell("step", R.number(row.step)), cell("group", `${row.mode === "train" ? "" : `${row.mode} `}${row.group ?? ""}`), cell("reward", R.number(row.reward)),
      cell("advantage", R.number(row.advantage)), cell("length", R.number(row.num_tokens)), cell("stop", R.visible(row.stop_reason)),
      R.el("span", { class: "cell snippet" }, row.has_tokens ? R.el("abbr", { title: "values of its tokens are stored" }, "◉ ") : null, R.visible(row.completion)));
  }

  function mark() {
    [...list.children].forEach((node, i) => node.setAttribute("aria-selected", String(i === at)));
    if (at >= 0 && list.children[at]) list.children[at].scrollIntoView({ block: "nearest" });
  }

  function choose(place) { at = Math.max(0, Math.min(rows.length - 1, place)); mark(); }

  function turn(by) {
    const next = state().offset + by * PAGE, count = Number(document.getElementById("found").dataset.count);
    if (next < 0 || next >= count) return;
    state().offset = next;
    at = -1;
    ask();
  }

  // -- a group

  async function open() {
    const row = rows[at];
    if (!row) return;
    if (row.group == null) return;
    let found;
    try { found = await R.source.group(info().run, row.step, row.group, row.mode); } catch (error) { R.fail(detail, error); return; }
    state().group = { row: row.id, found };
    showGroup();
    detail.scrollIntoView({ block: "nearest" });
    detail.focus({ preventScroll: true });
  }

  function message(prompt) {
    if (!Array.isArray(prompt)) return [R.el("div", { class: "text" }, R.visible(prompt))];
    return prompt.map((m) => R.el("div", { class: "text" }, R.el("b", {}, `${R.visible(m && m.role)}: `),
      R.visible(typeof (m && m.content) === "string" ? m.content : JSON.stringify(m && m.content))));
  }

  function one(row, all, coloured) {
    const pair = (name, value) => [R.el("dt", {}, R.visible(name)), R.el("dd", {}, R.number(value))];
    const scores = Object.entries(row.scores || {}).flatMap(([n, v]) => pair(n, v));
    const failures = Object.entries(row.failures || {}).map(([n, why]) => R.el("p", { class: "error" }, R.visible(`${n}: ${why}`)));
    const extra = Object.keys(row.extra || {}).length ? R.el("details", {}, R.el("summary", {}, "extra columns"), R.el("pre", {}, R.visible(JSON.stringify(row.extra, null, 1)))) : null;
    const text = row.tokens && coloured ? R.tokens(row, all, coloured) : R.el("div", { class: "text" }, R.visible(typeof row.completion === "string" ? row.completion : JSON.stringify(row.completion)));
    const own = state().group && state().group.row === row.id;
    return R.el("article", { class: own ? "one own" : "one" },
      R.el("dl", {}, ...scores, ...pair("reward", row.reward), ...pair("baseline", row.baseline), ...pair("advantage", row.advantage), ...pair("length", row.num_tokens)),
      R.el("p", { class: "quiet" }, `ended by ${R.visible(row.stop_reason)}`), text, ...failures, extra);
  }

  function showGroup() {
    const open = state().group;
    if (!open || !open.found.rows.length) return;
    const { step, group, mode, rows: all } = open.found;
    const columns = R.tokenColumns(all);
    if (columns.length && !columns.includes(state().color)) state().color = columns[0];
    const picker = columns.length ? R.el("label", {}, "Colour tokens by ", R.el("select", { id: "color", onchange: (event) => { state().color = event.target.value; showGroup(); } },
      ...columns.map((c) => R.el("option", { value: c, selected: c === state().color }, c)))) : R.el("span", { class: "quiet" }, "values of tokens are not stored for this group");
    const through = all[0].prompt_id && !/^0+$/.test(all[0].prompt_id) ? R.el("button", { type: "button", id: "through", onclick: () => showPrompt(all[0]) }, "This prompt through training") : null;
    detail.replaceChildren(R.el("h2", {}, `Group ${group} of ${mode === "train" ? "" : `${R.visible(mode)}, `}update ${step}: ${all.length} completions`),
      R.el("div", { class: "bar" }, picker, through, R.el("button", { type: "button", onclick: close }, "Close")),
      R.el("div", { id: "course" }), R.el("details", { open: true, class: "prompt" }, R.el("summary", {}, "Prompt"), ...message(all[0].prompt)),
      R.el("p", { class: "quiet" }, "Baseline: the mean reward of the others. The advantage also has the KL in it, if the reward has, and any scaling."),
      R.el("div", { class: "side", tabindex: 0, role: "region", "aria-label": "completions side by side" }, ...all.map((row) => one(row, all, state().color))));
  }

  async function showPrompt(row) {
    const box = document.getElementById("course");
    const found = await R.source.prompt(info().run, { prompt: row.prompt_id, mode: row.mode });
    const groups = found.groups.filter((g) => g.mean != null), take = (name) => groups.map((g) => g[name]);
    box.replaceChildren(R.el("p", {}, `This prompt has ${found.groups.length} group${found.groups.length === 1 ? "" : "s"}. Mean reward, least and largest: `,
      R.el("button", { type: "button", onclick: () => { state().query = { sort: "step", prompt: row.prompt_id, mode: row.mode }; state().offset = 0; R.render(); } }, "List all its completions")));
    if (groups.length) R.lines(box, [{ run: info().run, name: "reward", steps: take("step"), values: take("mean"), low: take("min"), high: take("max") }], 0, { height: 160 });
  }

  function close() { state().group = null; detail.replaceChildren(); list.focus(); }

  // -- the view

  R.views.completions = {
    title: "Completions",
    show(main) {
      if (!info().rows) { main.append(R.el("p", { class: "quiet" }, "No completions are stored here.")); return; }
      list = R.el("div", { id: "rows", role: "listbox", tabindex: 0, "aria-label": "Completions" });
      detail = R.el("section", { id: "group", tabindex: -1 });
      const head = R.el("div", { class: "row head", "aria-hidden": "true" }, ...["step", "group", "reward", "advantage", "length", "ended by", "completion"].map((n) => R.el("span", { class: "cell" }, n)));
      const prompt = state().query.prompt ? R.el("p", {}, "Only completions of one prompt. ", R.el("button", { type: "button", onclick: () => { state().query = { sort: "-step" }; R.render(); } }, "Show all")) : null;
      main.append(...[filters(), prompt, R.el("div", { class: "bar" }, R.el("span", { id: "found", role: "status" }),
        R.el("button", { type: "button", id: "before", onclick: () => turn(-1) }, "← Previous"), R.el("button", { type: "button", id: "after", onclick: () => turn(1) }, "Next →")),
        head, list, detail].filter(Boolean));
      rows = [];
      at = -1;
      ask();
      showGroup();
    },
    update() { if (list && list.isConnected && state().offset === 0) ask(true); },
    key(event) {
      const move = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (move) choose(at + move);
      else if (event.key === "Enter" && at >= 0 && !/^(BUTTON|SUMMARY)$/.test(event.target.tagName)) open();
      else if (event.key === "n") turn(1);
      else if (event.key === "p") turn(-1);
      else if (event.key === "Escape") close();
      else if (event.key === "/") document.getElementById("search").focus();
      else return false;
      return true;
    },
  };
})(window.Rloom);
