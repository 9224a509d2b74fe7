// Elements from data. Text is always text: nothing here, or anywhere else, parses markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "rect", "circle", "line", "text", "polyline", "polygon", "title", "defs", "pattern"]);

export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  const drawn = DRAWN.has(name);
  const made = drawn ? document.createElementNS(SVG, name) : document.createElement(name);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") {
      made.handlers = value;
      for (const [event, call] of Object.entries(value)) made[`on${event}`] = call;
    } else if (key === "css") {
      for (const [one, how] of Object.entries(value)) made.style.setProperty(one, how);
      made.styled = true;
    } else if (key === "class") made.setAttribute("class", [...classes, value].join(" "));
    else if (key === "value") made.value = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  append(made, children);
  return made;
}

function append(made, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(made, child);
    else if (child instanceof Node) made.append(child);
    else if (child !== null && child !== undefined && child !== false) made.append(String(child));
  }
}

// Make `root` show these children, keeping elements that are there already: focus and selection stay.
export function render(root, ...children) {
  const wanted = document.createDocumentFragment();
  append(wanted, children);
  morphChildren(root, wanted);
}

function morphChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, index) => {
    const has = old.childNodes[index];
    if (!has) old.append(node);
    else if (has !== node) morph(has, node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.dataset?.id !== fresh.dataset?.id) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (fresh.hasAttribute("data-keep") && old.hasAttribute("data-keep")) return;
  for (const { name, value } of [...fresh.attributes]) {
    if (name === "style") old.style.cssText = fresh.style.cssText; // the attribute itself is forbidden by the policy
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const event of Object.keys(old.handlers || {})) old[`on${event}`] = null;
  old.handlers = fresh.handlers;
  for (const [event, call] of Object.entries(fresh.handlers || {})) old[`on${event}`] = call;
  morphChildren(old, fresh);
}

export function link(to, props, ...children) {
  return h("a", { href: to, ...props }, ...children);
}
