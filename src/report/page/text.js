// Numbers as people read them, files as programs do.

// As printf rounds: exact ties go to the even digit, so that page and tables.md agree. What rounds to 0 has no sign.
function fixed(x, digits) {
  const scaled = x * 10 ** digits;
  const tie = Math.abs(scaled) < 1e15 && scaled - Math.floor(scaled) === 0.5;
  const text = (tie ? (2 * Math.round(scaled / 2)) / 10 ** digits : x).toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text;
}

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const count = (n) => (isNumber(n) ? d3.format(",")(n) : String(n));
const percent = (share) => (isNumber(share) ? fixed(100 * share, 1) : "–");
const signed = (text) => (text.startsWith("-") ? "−" + text.slice(1) : "+" + text);
const points = (share) => (isNumber(share) ? signed(fixed(100 * share, 1)) : "–");
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
const plural = (n, one, many = one + "s") => `${count(n)} ${n === 1 ? one : many}`;

// Three digits that count, without an exponent where that is short.
function short(x) {
  if (!isNumber(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e6 || size < 1e-3) return x.toExponential(1).replace("e+", "e").replace("-", "−");
  if (size >= 1000) return d3.format(",.0f")(x);
  return String(Number(x.toPrecision(3)));
}

function pValue(p) {
  if (!isNumber(p)) return "–";
  if (p === 0) return "0";
  return p < 1e-4 ? p.toExponential(0) : String(Number(p.toPrecision(1)));
}

const withDeviation = (entry) =>
  percent(entry?.accuracy) + (isNumber(entry?.deviation) ? ` ±${fixed(100 * entry.deviation, 1)}` : "");

function interval(test) {
  if (!isNumber(test?.low) || !isNumber(test?.high)) return "–";
  return `${points(test.low)} … ${points(test.high)}`;
}

function csv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\n").join("");
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// element("p", {class: "note"}, "text", child, ...): strings become text, never markup.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}
