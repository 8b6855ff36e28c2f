// The list of LSPs: sorted, and searched by number, label and word. Text of the corpus goes through textContent only.
"use strict";
(() => {
  // A row: [density, mean weight, typical words, information, positional, all words of its page]; a label: senses.
  const { rows, labels } = LSPS;
  const PAGE = 100, MOST_WORDS = 10;
  const $ = (id) => document.getElementById(id);
  const heaviest = Math.max(...rows.map((row) => row[0]), 1e-9);
  let column = 4, rising = false, limit = PAGE, wordsAsked = false;

  function element(name, content, properties = {}) {
    const made = document.createElement(name);
    made.append(...(Array.isArray(content) ? content : [content]));
    return Object.assign(made, properties);
  }

  function value(lsp) {
    return column === 0 ? lsp : rows[lsp][column - 1];
  }

  function order(lsps) {
    const sign = rising ? 1 : -1;
    return lsps.sort((a, b) => {
      const x = value(a), y = value(b);
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y) || a - b;
    });
  }

  function line(lsp) {
    const [density, weight, words, information, positional] = rows[lsp];
    const meter = element("span", "", { className: "meter" });
    meter.style.setProperty("--w", density / heaviest);
    const link = element("a", String(lsp), { href: `lsp/${lsp}.html` });
    const name = element("a", words || "–", { href: `lsp/${lsp}.html` });
    const sense = labels && labels[lsp] ? [element("span", labels[lsp], { className: "sense" })] : [];
    const mark = positional ? [element("span", " positional", { className: "positional", title: "its weight follows the position in the window" })] : [];
    return element("tr", [
      element("td", link, { className: "number" }),
      element("td", [`${(100 * density).toFixed(2)} %`, meter], { className: "number" }),
      element("td", information.toFixed(4), { className: "number" }),
      element("td", weight.toFixed(3), { className: "number wide" }),
      element("td", [name, ...mark, ...sense]),
    ]);
  }

  function matches(lsp, query) {
    const listed = rows[lsp][5].flatMap((text) => [text, ...text.split(/[ _]+/)]);
    const texts = [...listed, ...(labels && labels[lsp] || "").split(/[ ,.·]+/)];
    return String(lsp) === query || texts.some((text) => text.toLowerCase().startsWith(query));
  }

  function showLsps(query) {
    let found = rows.map((_, lsp) => lsp);
    if (query) found = found.filter((lsp) => matches(lsp, query));
    order(found);
    if (query && found.includes(Number(query))) found.sort((a, b) => (String(b) === query) - (String(a) === query));
    document.querySelector("#lsps tbody").replaceChildren(...found.slice(0, limit).map(line));
    $("count").textContent = query ? `${found.length.toLocaleString("en")} LSPs whose number, words or label begin with “${query}”` : "";
    $("lsps").hidden = !found.length;
    $("more").hidden = found.length <= limit;
    document.querySelectorAll("th").forEach((head) => {
      Number(head.firstElementChild.dataset.column) === column ? head.setAttribute("aria-sort", rising ? "ascending" : "descending") : head.removeAttribute("aria-sort");
    });
  }

  function chip(lsp, weight) {
    const name = rows[lsp][2].split(", ")[0];
    const made = element("a", [`${lsp} ${name} `, element("small", weight.toFixed(2))], { href: `lsp/${lsp}.html` });
    made.style.setProperty("--w", Math.min(1, weight * 2));
    return made;
  }

  function wordLine([word, count, lsps]) {
    const chips = element("div", lsps.map(([lsp, weight]) => chip(lsp, weight)), { className: "chips" });
    return element("li", [element("b", word), ` ${count.toLocaleString("en")} times`, chips]);
  }

  function showWords(query) {
    $("words").hidden = !query || /^\d+$/.test(query) && !window.WORDS?.some(([word]) => word === query);
    if ($("words").hidden) return;
    if (!window.WORDS) {
      if (!wordsAsked) { // loaded when somebody first searches: it is the largest file
        wordsAsked = true;
        document.head.append(element("script", "", { src: "data/words.js", onload: show }));
      }
      return;
    }
    const beginning = WORDS.filter(([word]) => word.toLowerCase().startsWith(query));
    const found = beginning.length ? beginning : WORDS.filter(([word]) => word.toLowerCase().includes(query));
    found.sort((a, b) => (b[0].toLowerCase() === query) - (a[0].toLowerCase() === query));
    const title = element("h2", found.length ? "Words" : `No word with “${query}” among the ${WORDS.length.toLocaleString("en")} most frequent`);
    $("words").replaceChildren(title, element("ul", found.slice(0, MOST_WORDS).map(wordLine)));
  }

  function show() {
    const query = $("query").value.trim().toLowerCase();
    showWords(query);
    showLsps(query);
  }

  document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
    const chosen = Number(button.dataset.column);
    rising = chosen === column ? !rising : chosen === 0 || chosen === 3;
    column = chosen;
    show();
  }));
  $("query").form.addEventListener("submit", (event) => event.preventDefault());
  $("query").addEventListener("input", () => { limit = PAGE; show(); });
  $("more").addEventListener("click", () => { limit += 4 * PAGE; show(); });
  $("query").value = new URLSearchParams(location.search).get("q") || "";
  show();
})();
