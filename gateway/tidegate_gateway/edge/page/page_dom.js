// Builds elements. Every text goes in as text, never as markup: names come from clients and engines.

export const $ = (id) => document.getElementById(id);

export function h(tag, classes, ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...children.map((child) => (child instanceof Node ? child : text(child))));
  return element;
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Rows are arrays of cells; a cell is a text, a number or an element. Heads that begin with # are over numbers.
export function table(heads, rows) {
  if (!rows.length) return h("p", "dim", "nothing yet");
  const kind = (head) => (head[0] === "#" ? "number" : "");
  const top = heads.map((head) => h("th", kind(head), head.replace("#", "")));
  const body = rows.map((cells) => {
    return h("tr", "", ...cells.map((cell, index) => {
      const made = h("td", kind(heads[index]) || (index ? (typeof cell === "string" ? "words" : "") : "name"), cell);
      if (!index) made.title = made.textContent;
      return made;
    }));
  });
  return h("table", "", h("thead", "", h("tr", "", ...top)), h("tbody", "", ...body));
}

// Parts are [share of the whole, class]; a mark is a share.
export function bar(parts, mark, title) {
  const made = h("div", "bar");
  for (const [share, classes] of parts) {
    const part = h("i", classes);
    part.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
    made.append(part);
  }
  if (mark !== undefined) {
    const line = h("u");
    line.style.left = `${100 * mark}%`;
    made.append(line);
  }
  if (title) made.title = title;
  return made;
}

function text(value) {
  if (value === null || value === undefined || value === "") return "–";
  return typeof value === "number" ? number(value) : String(value);
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${number(Math.floor(1000 * value) / 10)}%`);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size < 1) return `${Math.round(1000 * value)} ms`;
  if (size < 120) return `${number(value)} s`;
  return size < 7200 ? `${number(value / 60)} min` : `${number(value / 3600)} h`;
}

export const sum = (items, of) => items.reduce((total, item) => total + (of(item) || 0), 0);
