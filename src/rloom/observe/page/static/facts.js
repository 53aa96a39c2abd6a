"use strict";
// What runs are: what was said at their start, options, environment; and in what they differ.
(function (R) {
  function flat(value, name, found) {
    if (value && typeof value === "object" && !Array.isArray(value)) {
      for (const [key, inner] of Object.entries(value)) flat(inner, name ? `${name}.${key}` : key, found);
    } else found[name] = typeof value === "string" ? value : JSON.stringify(value);
    return found;
  }

  function table(title, several, onlyDifferent) {
    const names = [...new Set(several.flatMap(({ values }) => Object.keys(values)))];
    const differs = (name) => new Set(several.map(({ values }) => values[name])).size > 1;
    const shown = names.filter((name) => !onlyDifferent || differs(name));
    if (!shown.length) return null;
    const body = R.el("tbody", {}, ...shown.map((name) => R.el("tr", { class: several.length > 1 && differs(name) ? "differs" : "" },
      R.el("th", { scope: "row" }, R.visible(name)), ...several.map(({ values }) => R.el("td", {}, R.visible(values[name] ?? "–"))))));
    return R.el("section", { class: "card wide" }, R.el("h2", {}, title), R.el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, R.el("table", { class: "facts" },
      several.length > 1 ? R.el("thead", {}, R.el("tr", {}, R.el("th", {}), ...several.map((one) => R.el("th", {}, R.visible(one.name))))) : null, body)));
  }

  R.views.config = {
    title: "Config",
    async show(main) {
      const runs = R.shown(), version = R.version;
      const facts = await Promise.all(runs.map((info) => R.source.facts(info.run).catch(() => ({}))));
      if (version !== R.version) return;
      if (runs.length > 1) {
        main.append(R.el("form", { class: "bar" }, R.el("label", {}, R.el("input", { type: "checkbox", id: "differences", checked: R.state.differences,
          onchange: (event) => { R.state.differences = event.target.checked; R.render(); } }), " only what differs")));
      }
      const only = runs.length > 1 && R.state.differences;
      const part = (name) => runs.map((info, i) => ({ name: info.name, values: flat(facts[i][name] || {}, "", {}) }));
      const made = [["The run", "about"], ["Options", "options"], ["Environment", "environment"], ["Identity", "fixed"]]
        .map(([title, name]) => table(title, part(name), only)).filter(Boolean);
      main.append(...made);
      if (!made.length) main.append(R.el("p", { class: "quiet" }, only ? "These runs do not differ in what is written down." : "Nothing is written down about this run."));
    },
  };
})(window.Rloom);
