//! The rules of `deny.toml` for licences and sources.
//!
//! cargo-deny checks all rules if it is installed. Building it takes long, so the two most
//! important rules, licences and sources, are also checked without it.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::Value;
use spdx::{Expression, ParseMode};

use xtask_common::packages;
use xtask_common::process;
use xtask_common::progress::{self, heading};
use xtask_common::workspace;

use crate::test_run::TestRun;

/// The source of a package from crates.io in cargo's metadata.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

pub(crate) fn run(tests: &mut TestRun<'_>) {
    heading("dependencies");
    tests.check("licences and sources", |_, _| {
        let rules = std::fs::read_to_string(workspace::root().join("deny.toml"))
            .context("reading deny.toml")?;
        let allowed = allowed(&rules)?;
        let metadata = process::output(workspace::cargo().args([
            "metadata",
            "--format-version",
            "1",
            "--locked",
        ]))?;
        let metadata: Value = serde_json::from_str(&metadata).context("parsing cargo metadata")?;
        let packages = metadata["packages"].as_array().context("no packages")?;
        packages
            .iter()
            .try_for_each(|package| judge(package, &allowed))?;
        Ok(format!("{} packages", packages.len()))
    });
    if packages::runs("cargo", &["deny", "--version"]) {
        tests.check("cargo deny", |tests, step| {
            let mut cargo = workspace::cargo();
            cargo.args(["deny", "check", "licenses", "bans", "sources"]);
            process::run(&mut cargo, step, &tests.log("cargo-deny"))?;
            Ok(String::new())
        });
    } else {
        progress::say(
            "  -- cargo-deny is not installed: duplicates and advisories are not checked",
        );
    }
}

/// Checks the licence and the source of one package of cargo's metadata.
fn judge(package: &Value, allowed: &[String]) -> Result<()> {
    let name = package["name"]
        .as_str()
        .context("a package without a name")?;
    match package["source"].as_str() {
        None => {} // our own
        Some(CRATES_IO) => {}
        Some(other) => bail!("{name} comes from {other}, not from crates.io"),
    }
    let licence = package["license"]
        .as_str()
        .with_context(|| format!("{name} has no licence"))?;
    ensure!(
        permits(licence, allowed).with_context(|| format!("the licence of {name}"))?,
        "{name} is under {licence:?}, which deny.toml does not allow"
    );
    Ok(())
}

/// The list `allow` of the section `licenses`.
fn allowed(rules: &str) -> Result<Vec<String>> {
    let rules: toml::Table = rules.parse().context("parsing deny.toml")?;
    let list = rules
        .get("licenses")
        .and_then(|section| section.get("allow"));
    let list = list.and_then(toml::Value::as_array);
    let list = list.context("deny.toml has no list of allowed licences")?;
    let names = list.iter().map(|name| name.as_str().map(str::to_owned));
    names
        .collect::<Option<_>>()
        .context("a licence that is not a string")
}

/// Whether the allowed licences satisfy an SPDX expression.
fn permits(expression: &str, allowed: &[String]) -> Result<bool> {
    // Some older packages use a slash for OR.
    let parsed = Expression::parse_mode(expression, ParseMode::LAX);
    let parsed = parsed.map_err(|error| anyhow!("{expression:?}: {}", error.reason))?;
    Ok(parsed.evaluate(|licence| allowed.contains(&licence.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list(licences: &[&str]) -> Vec<String> {
        licences.iter().map(|&licence| licence.into()).collect()
    }

    #[test]
    fn licence_expressions_are_parsed() {
        let allowed = list(&["MIT", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"]);
        let permits = |expression| permits(expression, &allowed).unwrap();
        assert!(permits("MIT"));
        assert!(permits("MIT/Apache-2.0"));
        assert!(permits("GPL-3.0 OR MIT"));
        assert!(permits("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(permits("Apache-2.0 WITH LLVM-exception OR GPL-3.0"));
        assert!(!permits("Apache-2.0"));
        assert!(!permits("MIT AND GPL-3.0"));
        assert!(!permits("(MIT OR Apache-2.0) AND GPL-3.0"));
    }

    #[test]
    fn invalid_licence_expression_is_an_error() {
        for expression in ["", "MIT OR", "(MIT", "MIT MIT", "MIT WITH"] {
            assert!(
                permits(expression, &list(&["MIT"])).is_err(),
                "{expression:?}"
            );
        }
    }

    #[test]
    fn packages_are_checked_by_licence_and_source() {
        let package = |licence: Value, source: Value| {
            let name = "some";
            json!({"name": name, "license": licence, "source": source})
        };
        let judge = |package| judge(&package, &list(&["MIT"]));
        judge(package(json!("MIT"), Value::Null)).unwrap();
        judge(package(json!("MIT"), json!(CRATES_IO))).unwrap();
        judge(package(Value::Null, json!(CRATES_IO))).unwrap_err();
        judge(package(json!("GPL-3.0"), json!(CRATES_IO))).unwrap_err();
        judge(package(json!("MIT"), json!("git+https://example.org/some"))).unwrap_err();
    }

    #[test]
    fn the_allow_list_is_found() {
        let rules = "[licenses]\nallow = [\n  \"MIT\", # \"not this\"\n  \"ISC\",\n]\nother = []\n";
        assert_eq!(allowed(rules).unwrap(), ["MIT", "ISC"]);
        assert!(allowed("[bans]\n").is_err());
    }
}
