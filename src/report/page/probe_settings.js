// The model of a probe under each setting: what it loses and what it finds.

function addSettings(parent, settings) {
  const others = settings.filter((s) => s.name !== "none" && isNumber(s.difference));
  const worse = others.filter((s) => s.low > 0).length;
  const better = others.filter((s) => s.high < 0).length;
  const pair = element("div", { class: "pair" });
  parent.append(pair);
  addFigure(pair, {
    id: "probe-loss",
    title: `Of ${plural(others.length, "setting")}, ${count(better)} ${better === 1 ? "lowers" : "lower"} the log-loss and ${count(worse)} ${worse === 1 ? "raises" : "raise"} it`,
    note: "Mean log-loss per token less that of none, with the 95 % interval: left of the line is better. Filled where the interval leaves out 0.",
    alt: "One dot with its interval per setting; the line at 0 is the model as it is.",
    draw: (svg, width) =>
      drawIntervals(svg, width, settings.map((s) => ({ name: s.name, value: s.difference, low: s.low, high: s.high })), {
        line: 0,
        unit: "nats per token",
        format: (v) => (v === 0 ? "0" : signed(fixed(v, 4))),
      }),
    rows: () => [["setting", "difference, nats per token", "low", "high"], ...settings.map((s) => [s.name, s.difference, s.low, s.high])],
  });
  addNeedles(pair, settings);
  parent.append(settingTable(settings));
}

function addNeedles(parent, settings) {
  const tried = settings.filter((s) => isNumber(s.needle));
  if (tried.length === 0) return;
  const none = tried.find((s) => s.name === "none");
  const best = tried[d3.scan(tried, (a, b) => b.needle - a.needle)];
  addFigure(parent, {
    id: "probe-needles",
    title: `Most needles are found under “${best.name}”: ${percent(best.needle)}\u00a0%` + (none && none !== best ? `, under “none” ${percent(none.needle)}\u00a0%` : ""),
    note: "Share of needles in a text that the model finds, with the 95 % interval. The line is none. Filled where the interval leaves it out.",
    alt: "One dot with its interval per setting.",
    draw: (svg, width) =>
      drawIntervals(
        svg,
        width,
        tried.map((s) => ({ name: s.name, value: 100 * s.needle, low: scaled(s.needle_low), high: scaled(s.needle_high) })),
        { line: none ? 100 * none.needle : null, unit: "% of needles", domain: [0, 100], format: (v) => fixed(v, 1) },
      ),
    rows: () => [["setting", "needles found, share", "low", "high"], ...tried.map((s) => [s.name, s.needle, s.needle_low, s.needle_high])],
  });
}

const scaled = (share) => (isNumber(share) ? 100 * share : null);

// The name above, dot and interval below, the value at the right.
function drawIntervals(svg, width, entries, { line, unit, domain, format }) {
  const right = width - 74;
  const bottom = 6 + entries.length * BAR_ROW;
  svg.attr("height", bottom + MARGIN.bottom);
  const values = [...entries.flatMap((e) => [e.value, e.low, e.high]), line].filter(isNumber);
  const x = scaleOf({ domain: () => domain ?? d3.extent(values) }, values, [22, right]);
  const axis = d3.axisBottom(x).ticks(Math.max(2, Math.floor(width / 110))).tickFormat((v) => minus(short(v))).tickSizeOuter(0);
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom})`).call(axis);
  svg.append("text").attr("class", "unit").attr("x", right).attr("y", bottom + 34).attr("text-anchor", "end").text(unit);
  const drawn = entries.map((entry, i) => ({ ...entry, top: 6 + i * BAR_ROW }));
  drawn.forEach((entry) => drawInterval(svg, width, entry, x, line, format));
  const targets = drawn
    .filter((e) => isNumber(e.value))
    .map((e) => ({
      x: x(e.value),
      y: e.top + 30,
      title: e.name,
      lines: [
        { name: unit, value: format(e.value) },
        ...(isNumber(e.low) && isNumber(e.high) ? [{ name: "95 % interval", value: `${format(e.low)} … ${format(e.high)}` }] : []),
      ],
    }));
  return {
    targets,
    nearest: (px, py) => (targets.length ? d3.scan(targets, (a, b) => Math.abs(a.y - py) - Math.abs(b.y - py)) : -1),
    mark: (group, t) => group.append("circle").attr("class", "rim").attr("cx", t.x).attr("cy", t.y).attr("r", 9),
  };
}

function drawInterval(svg, width, { name, value, low, high, top }, x, line, format) {
  const y = top + 30;
  shorten(svg.append("text").attr("x", 8).attr("y", top + 14).text(name), width - 8);
  svg.append("g").attr("class", "grid").append("line").attr("x1", x.range()[0]).attr("x2", x.range()[1]).attr("y1", y).attr("y2", y);
  svg.append("text").attr("x", width - 66).attr("y", y + 4).attr("font-weight", 600).text(isNumber(value) ? format(value) : "–");
  if (!isNumber(value)) return;
  if (isNumber(line)) svg.append("line").attr("class", "axis-line").attr("x1", x(line)).attr("x2", x(line)).attr("y1", top + 20).attr("y2", top + 40);
  const bounded = isNumber(low) && isNumber(high);
  const sure = bounded && isNumber(line) && (low > line || high < line);
  if (bounded) svg.append("line").attr("class", "interval").attr("x1", x(low)).attr("x2", x(high)).attr("y1", y).attr("y2", y);
  const dot = svg.append("circle").attr("class", "estimate").attr("cx", x(value)).attr("cy", y).attr("r", 5);
  if (sure) dot.attr("class", "estimate sure");
}

function settingTable(settings) {
  const interval = (value, low, high, digits, sign) => {
    const text = (v) => (sign && v !== 0 ? signed(fixed(v, digits)) : fixed(v, digits));
    return isNumber(value) ? text(value) + (isNumber(low) && isNumber(high) ? ` [${text(low)}, ${text(high)}]` : "") : "–";
  };
  return element(
    "details",
    {},
    element("summary", {}, "Every setting as a table"),
    table(
      "With 95 % intervals",
      [{ text: "setting", class: "text" }, "perplexity", "log-loss against none, nats", "needles found, %", "tokens of text"],
      settings.map((s) => [
        { text: s.name, class: "text", "data-setting": s.name },
        interval(s.perplexity, s.perplexity_low, s.perplexity_high, 2),
        interval(s.difference, s.low, s.high, 4, true),
        interval(scaled(s.needle), scaled(s.needle_low), scaled(s.needle_high), 1),
        count(s.tokens),
      ]),
    ),
  );
}
