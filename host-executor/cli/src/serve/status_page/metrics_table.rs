//! All metrics in a table, as `/metrics` has them.

use super::html::escaped;

/// A table of every sample in a text of OpenMetrics.
pub(super) fn table(metrics: &str) -> String {
    let mut rows = String::new();
    let mut help = "";
    for line in metrics.lines() {
        if let Some(comment) = line.strip_prefix("# HELP ") {
            help = comment.split_once(' ').map_or("", |(_, help)| help);
        }
        let Some((sample, value)) = line.rsplit_once(' ').filter(|_| !line.starts_with('#')) else {
            continue;
        };
        let (name, labels) = match sample.split_once('{') {
            Some((name, labels)) => (name, labels.trim_end_matches('}')),
            None => (sample, ""),
        };
        rows.push_str(&format!(
            "<tr><th scope=\"row\" title=\"{}\">{}</th><td>{}</td><td class=\"number\">{}</td></tr>",
            escaped(help),
            escaped(name),
            escaped(labels),
            escaped(value)
        ));
    }
    format!(
        "<div class=\"scroll\" role=\"region\" aria-label=\"All metrics, a table\" tabindex=\"0\">\
         <table id=\"metrics\"><thead><tr><th scope=\"col\">Metric</th>\
         <th scope=\"col\">Labels</th><th scope=\"col\" class=\"number\">Value</th></tr></thead>\
         <tbody>{rows}</tbody></table></div>"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sample_has_a_row() {
        let text = "# HELP a Some help.\n# TYPE a gauge\na 1\n\
                    b_total{x=\"y\",z=\"<\"} 2.5\n# EOF\n";
        let table = table(text);
        for row in [
            "title=\"Some help.\">a</th><td></td><td class=\"number\">1</td>",
            ">b_total</th><td>x=&quot;y&quot;,z=&quot;&lt;&quot;</td><td class=\"number\">2.5</td>",
        ] {
            assert!(table.contains(row), "{row} is not in {table}");
        }
        assert_eq!(table.matches("<tr>").count(), 3);
    }
}
