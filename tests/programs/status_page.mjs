// Looks at the status page in Chromium as a person would, with puppeteer-core in the folder
// PUPPETEER.
//
// Usage: node status_page.mjs CHROMIUM URL FOLDER. Writes screenshots into FOLDER, and prints what
// it has seen as one line of JSON. After a line on its input, for which the executor has ended, it
// prints what the page says then.
import { createInterface } from "node:readline/promises";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const installed = "node_modules/puppeteer-core/lib/esm/puppeteer/puppeteer-core.js";
const { default: puppeteer } = await import(
  pathToFileURL(join(process.env.PUPPETEER, installed)).href
);

const [chromium, url, folder] = process.argv.slice(2);
// How long to look: the page asks for itself every two seconds.
const LOOK = 5000;
const sleep = (time) => new Promise((resolve) => setTimeout(resolve, time));

const browser = await puppeteer.launch({
  executablePath: chromium,
  // Chromium's own sandbox does not work as root.
  args: ["--no-sandbox", "--disable-gpu", "--no-first-run"],
});

// Opens the page. `seen` gets what the browser complains about, and what it asks for.
async function open({ width, height, scheme, script }) {
  const page = await browser.newPage();
  const seen = { complaints: [], requests: [] };
  page.on("console", (message) => seen.complaints.push(message.text()));
  page.on("pageerror", (error) => seen.complaints.push(String(error)));
  page.on("requestfailed", (request) => seen.complaints.push(`${request.url()} failed`));
  page.on("request", (request) => seen.requests.push(request.url()));
  await page.setViewport({ width, height });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.setJavaScriptEnabled(script);
  await page.goto(url);
  return { page, seen };
}

// What a screen reader finds: role and name of each node, in order.
function flatten(node, nodes = []) {
  nodes.push({ role: node.role, name: node.name ?? "" });
  for (const child of node.children ?? []) flatten(child, nodes);
  return nodes;
}

// Functions of the page have no closure over this file.
const layout = () => ({
  wide: document.documentElement.scrollWidth > innerWidth,
  background: getComputedStyle(document.body).backgroundColor,
  color: getComputedStyle(document.body).color,
  charts: [...document.querySelectorAll("figure")].map((figure) => ({
    title: figure.querySelector("figcaption")?.textContent ?? "",
    curves: figure.querySelectorAll("polyline").length,
    width: figure.getBoundingClientRect().width,
    height: figure.getBoundingClientRect().height,
  })),
  tables: [...document.querySelectorAll("table")].map((table) => ({
    rows: [...table.querySelectorAll("tbody tr")].map((row) =>
      [...row.querySelectorAll("th, td")].map((cell) => cell.textContent.trim()),
    ),
  })),
  notice: document.getElementById("notice")?.textContent ?? "",
});

const result = {};
{
  const { page, seen } = await open({ width: 1280, height: 1000, scheme: "light", script: true });
  await page.evaluate(() => (window.notLoadedAgain = true));
  result.first = await page.evaluate(layout);
  await sleep(LOOK);
  result.later = await page.evaluate(layout);
  result.notLoadedAgain = await page.evaluate(() => window.notLoadedAgain === true);
  result.tree = flatten(await page.accessibility.snapshot({ interestingOnly: false }));
  await page.screenshot({ path: join(folder, "light.png") });
  result.seen = seen;
  result.open = page;
}
for (const [name, options] of Object.entries({
  dark: { width: 1280, height: 1000, scheme: "dark", script: true },
  phone: { width: 390, height: 844, scheme: "light", script: true },
  plain: { width: 1280, height: 1000, scheme: "light", script: false },
})) {
  const { page, seen } = await open(options);
  result[name] = { ...(await page.evaluate(layout)), complaints: seen.complaints };
  await page.screenshot({ path: join(folder, `${name}.png`) });
  await page.close();
}
const { open: page, ...printed } = result;
console.log(JSON.stringify(printed));

const input = createInterface({ input: process.stdin });
await input[Symbol.asyncIterator]().next();
// The executor has ended.
await sleep(LOOK);
console.log(JSON.stringify({ notice: (await page.evaluate(layout)).notice }));
await browser.close();
process.exit(0);
