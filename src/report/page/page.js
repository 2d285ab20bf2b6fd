// The page from top to bottom.

function section(title, note) {
  const made = element("section", {}, element("h2", {}, title), note ? element("p", { class: "note" }, note) : null);
  document.getElementById("report").append(made);
  return made;
}

function header(kicker, headline, below) {
  document.title = `whet: ${kicker}`;
  document
    .getElementById("report")
    .append(element("header", {}, element("p", { class: "kicker" }, `whet · ${kicker}`), element("h1", {}, ...headline), element("p", {}, below)));
}

// ---- the headline

// The size at which a rule differs most from softmax.
function largestGain(run, rule) {
  const gains = summaryOf(run)
    .map((size) => ({ items: size.items, entry: own(size.rules, rule), plain: own(size.rules, "softmax"), ceiling: own(size.rules, "hard") }))
    .filter(({ entry, plain }) => isNumber(entry?.accuracy) && isNumber(plain?.accuracy))
    .map((g) => ({ ...g, gain: g.entry.accuracy - g.plain.accuracy }));
  return gains.length ? gains[d3.scan(gains, (a, b) => Math.abs(b.gain) - Math.abs(a.gain))] : null;
}

function runHeadline(run) {
  const rule = ["paper", ...rulesOf(run)].find((r) => r !== "softmax" && r !== "hard" && largestGain(run, r));
  const best = rule ? largestGain(run, rule) : null;
  if (!best) return [["Heads that retrieve the largest item"], "These results hold no rule beside softmax."];
  if (Math.abs(best.gain) < 0.0005) return alikeHeadline(run, rule);
  const p = best.entry.against_softmax.p;
  const headline = [
    `Of sets of ${count(best.items)} items, ${ruleInSentence(rule)} answers ${percent(best.entry.accuracy)}\u00a0% and softmax ${percent(best.plain.accuracy)}\u00a0%: `,
    element("strong", {}, `${points(best.gain)} points`),
    isNumber(p) ? `, p = ${pValue(p)}` : "",
  ];
  const below =
    `The largest difference of ${plural(summaryOf(run).length, "size")}, ${plural(modelsOf(run).length, "head")}.` +
    (isNumber(best.ceiling?.accuracy) ? ` The ceiling of these heads, whatever the temperature, is ${percent(best.ceiling.accuracy)}\u00a0% there.` : "");
  return [headline, below];
}

function alikeHeadline(run, rule) {
  const last = summaryOf(run)[summaryOf(run).length - 1];
  return [
    [
      `${capital(ruleInSentence(rule))} and softmax answer alike at every size: `,
      element("strong", {}, `${percent(own(last.rules, "softmax")?.accuracy)}\u00a0%`),
      ` of sets of ${count(last.items)} items`,
    ],
    `Within 0.05 points at ${plural(summaryOf(run).length, "size")}, ${plural(modelsOf(run).length, "head")}.`,
  ];
}

function comparisonHeadline(data) {
  const rule = ["target_entropy", "paper", "softmax"].find((r) => commonRules(data.runs).includes(r));
  const found = data.comparison
    .flatMap((c) => c.sizes.map((size) => ({ c, items: size.items, test: own(size.rules, rule) })))
    .filter(({ test }) => isNumber(test?.difference));
  const names = data.runs.map((run) => run.name).join(", ");
  if (!rule || found.length === 0) return [[`${plural(data.runs.length, "run")} side by side`], names];
  const { c, items, test } = found[d3.scan(found, (a, b) => Math.abs(b.test.difference) - Math.abs(a.test.difference))];
  const headline = [
    `At ${count(items)} items under ${ruleInSentence(rule)}, ${data.runs[c.run].name} differs from ${data.runs[c.against].name} by `,
    element("strong", {}, `${points(test.difference)} points`),
    isNumber(test.p) ? `, p = ${pValue(test.p)}` : "",
  ];
  return [headline, `The largest difference between ${plural(data.runs.length, "run")}: ${names}.`];
}

// ---- one function per kind of results

function drawReproductions(data) {
  const { runs } = data;
  const one = runs.length === 1;
  if (!one) nameWhatTrained(runs);
  header(one ? `reproduction of “softmax is not enough”, ${runs[0].name}` : "runs compared", ...(one ? runHeadline(runs[0]) : comparisonHeadline(data)));
  if (one) addPaperTable(section("The paper’s Table 1, and these heads"), runs[0]);
  else {
    addRanking(section("Ranked as they were trained"), runs);
    addComparisonTable(section("Differences"), data);
  }
  addHeatMap(section("Where the weights go"), runs);
  const accuracy = section("Accuracy against size");
  addAccuracy(accuracy, runs);
  if (one) addGains(accuracy, runs[0]);
  if (one) addRuleTable(accuracy, runs[0]);
  addLosses(accuracy, runs);
  const sharpness = section("Sharpness against size");
  addEntropy(sharpness, runs);
  addLargestWeight(sharpness, runs);
  addFit(section("Temperature from entropy"), runs);
  addCalibrated(section("Calibrated heads"), runs);
  addTraining(section("Training"), runs);
  addOrigin(section("How it was made"), runs);
  document.querySelectorAll("section").forEach((made) => {
    if (made.childElementCount === 1) made.remove(); // results without it
  });
}

const KINDS = { reproduction: drawReproductions, benchmark: drawBenchmarks, probe: drawProbe, clrs: drawClrs };

function drawPage() {
  const data = JSON.parse(document.getElementById("data").textContent);
  KINDS[data.runs[0].results.kind](data);
}

drawPage();

// Little wider than a page of paper, so that text is scaled down little.
addEventListener("beforeprint", () => FIGURES.forEach((figure) => figure.redraw(760)));
addEventListener("afterprint", () => FIGURES.forEach((figure) => figure.redraw()));

// `whet report --format svg` reads the figures from here: as JSON without markup.
if (location.hash === "#svg") {
  const files = FIGURES.map((figure) => ({ name: `${figure.id}.svg`, svg: figure.export(760) }));
  const json = JSON.stringify(files).replace(/[<>&\u0080-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  document.body.replaceChildren(element("pre", { id: "svg" }, json));
}
