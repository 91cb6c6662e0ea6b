//! The status page: its structure, and its figures beside the metrics.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;

use served::site::{ALICE, BOB, Site, http, work};
use vgpu_transport::wire::{DeviceIndex, Offer, Reply, Request};

const METRICS: &str = "metrics.listen = \"unix:DIR/metrics.sock\"\n";

/// Elements without content and end tag.
const VOID: [&str; 2] = ["link", "meta"];

fn get(site: &Site, path: &str) -> (String, String) {
    let socket = UnixStream::connect(site.folder.join("metrics.sock"));
    http(socket.expect("it listens"), "GET", path)
}

/// An element of a page, with the text directly in it and in what it contains.
#[derive(Debug, Default)]
struct Element {
    name: String,
    attributes: Vec<(String, String)>,
    /// The names of the elements around it, the innermost last.
    around: Vec<String>,
    text: String,
}

impl Element {
    fn get(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

fn unescaped(text: &str) -> String {
    let text = text.replace("&lt;", "<").replace("&gt;", ">");
    let text = text.replace("&quot;", "\"").replace("&#39;", "'");
    text.replace("&amp;", "&")
}

/// Reads `name="value"` pairs, which must be quoted.
fn attributes(mut text: &str) -> Vec<(String, String)> {
    let mut found: Vec<(String, String)> = Vec::new();
    loop {
        text = text.trim_start();
        if text.is_empty() {
            return found;
        }
        let end = text.find([' ', '=']).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        assert!(
            name.bytes()
                .all(|b| b.is_ascii_lowercase() || b == b'-' || b == b':')
                || ["viewBox", "preserveAspectRatio"].contains(&name),
            "an attribute {name:?}"
        );
        assert!(found.iter().all(|(known, _)| known != name), "{name} twice");
        let (value, rest) = match rest.strip_prefix("=\"") {
            Some(rest) => rest.split_once('"').expect("a closing quote"),
            None => ("", rest),
        };
        assert!(!value.contains(['<', '>']), "{value:?}");
        found.push((name.into(), unescaped(value)));
        text = rest;
    }
}

/// Reads a page, stricter than browsers do: every element is closed in order, every value is
/// quoted, and no `<` or `&` stands for itself.
fn parse(page: &str) -> Vec<Element> {
    let mut rest = page.strip_prefix("<!DOCTYPE html>\n").expect("a doctype");
    let mut elements: Vec<Element> = Vec::new();
    // Positions of the open elements.
    let mut open: Vec<usize> = Vec::new();
    while let Some((text, tag)) = rest.split_once('<') {
        assert!(!text.contains('>'), "{text:?}");
        for entity in text.split('&').skip(1) {
            let (name, _) = entity.split_once(';').expect("an entity");
            assert!(
                ["lt", "gt", "amp", "quot", "#39"].contains(&name),
                "&{name}"
            );
        }
        for &at in &open {
            elements[at].text.push_str(&unescaped(text));
        }
        let (tag, after) = tag.split_once('>').expect("the end of a tag");
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            let closed = open.pop().expect("an open element");
            assert_eq!(elements[closed].name, name, "{:?}", elements[closed]);
            continue;
        }
        let (name, values) = tag.split_once(' ').unwrap_or((tag, ""));
        let around = open.iter().map(|&at| elements[at].name.clone());
        elements.push(Element {
            name: name.into(),
            attributes: attributes(values),
            around: around.collect(),
            text: String::new(),
        });
        if !VOID.contains(&name) {
            open.push(elements.len() - 1);
        }
    }
    assert!(
        open.is_empty() && rest.trim().is_empty(),
        "{open:?} {rest:?}"
    );
    elements
}

/// Name, labels and value of each sample.
fn samples(metrics: &str) -> Vec<(String, String, String)> {
    let lines = metrics.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (sample, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
            (
                name.into(),
                labels.trim_end_matches('}').into(),
                value.into(),
            )
        })
        .collect()
}

/// What is wrong with the structure.
fn check_structure(elements: &[Element]) {
    let of = |name: &'static str| elements.iter().filter(move |one| one.name == name);
    let html = of("html").next().expect("html");
    assert_eq!(html.get("lang"), Some("en"));
    assert_eq!(
        of("title")
            .filter(|one| one.around == ["html", "head"])
            .count(),
        1
    );
    assert_eq!((of("h1").count(), of("main").count()), (1, 1));
    let mut ids = BTreeSet::new();
    for id in elements.iter().filter_map(|one| one.get("id")) {
        assert!(ids.insert(id), "{id} twice");
    }
    for element in elements {
        let parent = element.around.last().map(String::as_str);
        match element.name.as_str() {
            "th" | "td" => assert_eq!(parent, Some("tr")),
            "tr" => assert!(matches!(parent, Some("thead" | "tbody"))),
            "thead" | "tbody" => assert_eq!(parent, Some("table")),
            "li" => assert_eq!(parent, Some("ul")),
            "figcaption" => assert_eq!(parent, Some("figure")),
            "rect" | "polyline" | "path" => assert_eq!(parent, Some("svg")),
            _ => {}
        }
        // Nothing of other sites, nothing in line.
        for name in ["src", "href"] {
            let value = element.get(name).unwrap_or_default();
            assert!(
                ["", "page.css", "page.js", "data:,"].contains(&value),
                "{value}"
            );
        }
        for (name, _) in &element.attributes {
            assert!(name != "style" && !name.starts_with("on"), "{element:?}");
        }
        assert!(element.name != "script" || element.text.is_empty());
        assert_ne!(element.name, "style");
        // A name that assistive technology says.
        let named = match element.name.as_str() {
            "svg" => element.get("role") == Some("img") && element.get("aria-label").is_some(),
            "section" => { element.get("aria-labelledby") }.is_some_and(|id| ids.contains(id)),
            "th" => element.get("scope").is_some() && !element.text.is_empty(),
            "figure" | "summary" => !element.text.is_empty(),
            "ul" => element.get("aria-label").is_some(),
            _ => element.get("tabindex").is_none() || element.get("aria-label").is_some(),
        };
        assert!(named, "{element:?} has no name");
        assert_ne!(element.get("aria-label"), Some(""), "{element:?}");
    }
}

#[test]
fn page_has_every_figure_of_the_metrics_and_names_for_everybody() {
    let site = Site::start("page", &format!("{METRICS}{ALICE}{BOB}"));
    let mut alice = site.guest("alice.sock");
    work(&mut alice);
    alice.fence();
    // A name that would be a script.
    let mut hostile = site.serve.connect(&site.folder.join("flag.sock"));
    let welcome = hostile.ask(&Request::Hello {
        offer: Offer::SERVED,
        name: "<script>alert(\"1\")</script>&".into(),
        device: DeviceIndex(0),
    });
    assert!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
    hostile.fence();

    let (_, metrics) = get(&site, "/metrics");
    let (head, page) = get(&site, "/");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    for header in [
        "Content-Type: text/html; charset=utf-8",
        "Content-Security-Policy: default-src 'none'; style-src 'self'; script-src 'self';",
    ] {
        assert!(head.contains(header), "{head}");
    }
    let elements = parse(&page);
    check_structure(&elements);
    let cells = elements.iter().filter(|one| one.name == "td");
    assert!(
        cells
            .clone()
            .any(|cell| cell.text == "<script>alert(\"1\")</script>&")
    );

    // Every sample, with the same value where nothing has happened meanwhile.
    let all = samples(&metrics);
    assert!(all.len() > 100, "{}", all.len());
    let rows = page
        .split("<tr>")
        .filter(|row| row.contains("class=\"number\""));
    let rows: Vec<String> = rows.map(unescaped).collect();
    for (name, labels, value) in &all {
        let start = format!(">{name}</th><td>{labels}</td><td class=\"number\">");
        let row = rows.iter().find_map(|row| row.split_once(&start));
        let (_, after) = row.unwrap_or_else(|| panic!("no row has {name}{{{labels}}}"));
        if name.starts_with("vgpu_guest") {
            assert!(after.starts_with(&format!("{value}<")), "{name}: {after}");
        }
    }
    // For people: a row for each guest, and a curve for each figure.
    for name in ["alice", "bob", "unnamed guests"] {
        let heading = |one: &&str| *one == name;
        let headings = elements.iter().filter(|one| one.name == "th");
        assert!(
            headings
                .map(|one| one.text.as_str())
                .any(|text| heading(&text)),
            "{name}"
        );
    }
    let label = { elements.iter() }
        .filter_map(|one| one.get("aria-label"))
        .find(|label| label.starts_with("Memory of alice"));
    assert_eq!(label, Some("Memory of alice: 8 B of 1.0 MiB"));
    for title in [
        "Tokens per second",
        "Graphs per second",
        "Share of the engine's time",
        "Run time of a graph",
        "Time of a graph in the queue",
        "Graphs in a batch",
    ] {
        let found = elements
            .iter()
            .find(|one| one.name == "figcaption" && one.text == title);
        assert!(found.is_some(), "{title}");
    }

    // What the page asks for, and nothing else.
    for (path, kind) in [("/page.css", "text/css"), ("/page.js", "text/javascript")] {
        let (head, text) = get(&site, path);
        assert!(head.contains(kind) && !text.is_empty(), "{head}");
        assert!(!text.contains("://"), "{path}");
    }
    site.end();
}

#[test]
fn curves_show_what_has_happened_between_two_looks() {
    let site = Site::start("curves", &format!("{METRICS}{ALICE}"));
    let label = |page: &str| {
        let elements = parse(page);
        let labels = elements.iter().filter_map(|one| one.get("aria-label"));
        let mut graphs = labels.filter(|label| label.starts_with("Graphs per second"));
        graphs.next().expect("a chart").to_owned()
    };
    let (_, first) = get(&site, "/");
    assert!(label(&first).ends_with("nothing yet"), "{}", label(&first));
    let mut alice = site.guest("alice.sock");
    for _ in 0..20 {
        work(&mut alice);
    }
    alice.fence();
    // Samples are a second apart at least. A scrape is a look, too.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    get(&site, "/metrics");
    let (_, second) = get(&site, "/");
    let said = label(&second);
    let rate = said.split("alice: last ").nth(1).expect("a curve of alice");
    let rate: f64 = rate
        .split(',')
        .next()
        .expect("a number")
        .parse()
        .expect("a number");
    assert!(rate > 0.0 && rate <= 20.0, "{said}");
    assert!(second.contains("<polyline"), "{second}");
    // A drain is the first thing to see.
    let drained = site.run("drain", &["--deadline", "0s"]).output();
    assert_eq!(drained.expect("it starts").status.code(), Some(3));
    let (_, third) = get(&site, "/");
    let warning = "<p class=\"warning\">The executor drains: no new sessions for ";
    assert!(third.contains(warning), "{third}");
    site.end();
}
