"use strict";
// Asks for the page again while somebody looks, and changes what differs.

const PERIOD = 2000;

// Makes `old` equal to `fresh`, and keeps what is equal: the focus and a selection stay.
function update(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(document.importNode(fresh, true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    // What the reader has opened stays open.
    if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  const children = [...old.childNodes];
  const wanted = [...fresh.childNodes];
  wanted.forEach((child, i) => {
    if (i < children.length) update(children[i], child);
    else old.append(document.importNode(child, true));
  });
  children.slice(wanted.length).forEach((child) => child.remove());
}

async function refresh() {
  const notice = document.getElementById("notice");
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    update(document.querySelector("main"), page.querySelector("main"));
    if (notice.textContent !== "") notice.textContent = "";
  } catch (error) {
    const text = "The executor does not answer. The figures are old.";
    if (notice.textContent !== text) notice.textContent = text;
  }
}

let timer;
function schedule() {
  clearTimeout(timer);
  if (document.hidden) return;
  timer = setTimeout(async () => {
    await refresh();
    schedule();
  }, PERIOD);
}

document.addEventListener("visibilitychange", schedule);
schedule();
