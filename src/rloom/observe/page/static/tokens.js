"use strict";
// A completion's tokens, each coloured by one of its values; all of them, exactly, on hover or by the arrow keys.
(function (R) {
  const diverging = new Set(["log-ratio", "advantage", "mismatch"]);

  // The values that can be told of a row's tokens, by name.
  function columns(row) {
    const t = row.tokens, found = {};
    const minus = (a, b) => a.map((v, i) => (v == null || b[i] == null ? null : v - b[i]));
    if (t.policy && t.reference) found["log-ratio"] = minus(t.policy, t.reference);
    if (t.kl) found.KL = t.kl;
    if (t.entropy) found.entropy = t.entropy;
    found.advantage = t.advantage || t.ids.map(() => row.advantage);
    if (t.policy && t.sampling) found.mismatch = minus(t.policy, t.sampling);
    return found;
  }
  R.tokenColumns = (rows) => [...new Set(rows.filter((r) => r.tokens).flatMap((r) => Object.keys(columns(r))))];

  const scaleOf = (rows, name) => {
    const sizes = rows.filter((r) => r.tokens).flatMap((r) => columns(r)[name] || []).filter((v) => v != null).map(Math.abs).sort((a, b) => a - b);
    return sizes.length ? sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1 : 1;
  };

  function background(value, name, scale) {
    if (value == null) return "transparent";
    const strength = Math.min(1, Math.abs(value) / scale) * 0.75;
    const color = diverging.has(name) ? (value < 0 ? "214, 69, 65" : "38, 139, 110") : "201, 130, 10";
    return `rgba(${color}, ${strength.toFixed(3)})`;
  }

  // Nine digits tell every float32 from its neighbours.
  const exact = (v) => (typeof v === "number" ? String(Number(v.toPrecision(9))) : v);

  function tell(row, known, place, target) {
    const t = row.tokens, tip = document.getElementById("tip");
    const line = (name, v) => (v == null ? null : R.el("tr", {}, R.el("th", {}, name), R.el("td", {}, exact(v))));
    const at = (list) => (list ? list[place] : null);
    tip.replaceChildren(R.el("table", {}, R.el("tbody", {},
      line("token", R.visible(JSON.stringify(t.texts[place]))), line("id", t.ids[place]),
      ...Object.entries(known).map(([name, list]) => line(name, at(list))),
      line("log π (policy)", at(t.policy)), line("log π (reference)", at(t.reference)), line("log π (sampling)", at(t.sampling)))));
    tip.hidden = false;
    const box = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - size.width - 4))}px`;
    tip.style.top = `${box.bottom + size.height + 4 < innerHeight ? box.bottom + 4 : Math.max(4, box.top - size.height - 4)}px`;
  }
  const hide = () => { document.getElementById("tip").hidden = true; };

  // The tokens of a row. `rows` are those of its group, which share a scale.
  R.tokens = function (row, rows, name) {
    const known = columns(row), scale = scaleOf(rows, name), values = known[name] || [];
    const box = R.el("div", { class: "text tokens", tabindex: 0, role: "group", "aria-label": `tokens, coloured by ${name}; arrow keys tell values` });
    const spans = row.tokens.texts.map((text, i) => {
      const span = R.el("span", { class: "token" }, R.visible(text) || "∅");
      span.style.backgroundColor = background(values[i], name, scale);
      span.addEventListener("mouseenter", () => tell(row, known, i, span));
      span.addEventListener("mouseleave", hide);
      return span;
    });
    let at = -1;
    const move = (by) => {
      if (at >= 0) spans[at].classList.remove("at");
      at = Math.max(0, Math.min(spans.length - 1, at + by));
      spans[at].classList.add("at");
      spans[at].scrollIntoView({ block: "nearest" });
      tell(row, known, at, spans[at]);
    };
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) { move(by); event.preventDefault(); event.stopPropagation(); }
    });
    box.addEventListener("blur", () => { if (at >= 0) spans[at].classList.remove("at"); hide(); });
    box.append(...spans);
    return box;
  };
})(window.Rloom);
