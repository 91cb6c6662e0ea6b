//! The elements for libvirt, checked against libvirt's own schema.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use xtask_common::packages;
use xtask_common::process;
use xtask_common::scratch::Scratch;
use xtask_common::workspace;

use crate::test_run::TestRun;

/// Faults of a domain: a part of its text, and what stands there instead.
const FAULTS: [(&str, &str); 4] = [
    // A misspelt attribute, and a misspelt element.
    (" ioeventfd='on'", " ioeventfds='on'"),
    ("<server ", "<servers "),
    // Values of another type.
    ("'ivshmem-doorbell'", "'ivshmem-dorbell'"),
    ("vectors='1'", "vectors='one'"),
];

/// The domain of `deploy/` is valid, also with the element of the documentation in place of its
/// own; and one with a fault is refused.
pub(super) fn check(tests: &TestRun<'_>) -> Result<String> {
    let has_programs = packages::has_libvirt_schemas();
    if !tests.options.full && !has_programs {
        return Ok("not checked: there is no virt-xml-validate with xmllint here".into());
    }
    packages::libvirt_schemas(tests.cache)?;
    let read = |file: &str| {
        let file = workspace::root().join(file);
        fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))
    };
    let domain = read("deploy/vm/libvirt.xml")?;
    let page = read("docs/virtual-machines.md")?;
    let documented = domain.replace(element(&domain)?, element(&page)?);
    let scratch = Scratch::new()?;
    let file = scratch.path().join("domain.xml");
    let mut refused = 0;
    for (name, text) in [("deploy/vm/libvirt.xml", domain), ("the page", documented)] {
        validate(&text, &file).with_context(|| format!("the element of {name}"))?;
        for (part, fault) in FAULTS {
            ensure!(text.contains(part), "no {part:?} in that of {name}");
            let error = validate(&text.replace(part, fault), &file).err();
            let error = error.with_context(|| format!("{name} is valid with {fault:?}"))?;
            ensure!(
                format!("{error:#}").contains("Relax-NG validity error"),
                "{fault:?} ends in another error: {error:#}"
            );
            refused += 1;
        }
    }
    Ok(format!(
        "virt-xml-validate; {refused} domains with a fault refused"
    ))
}

/// The element of the device in a domain or in a page, which has one.
fn element(text: &str) -> Result<&str> {
    let (start, end) = ("<shmem ", "</shmem>");
    let starts = text.matches(start).count();
    ensure!(starts == 1, "{starts} elements {start}...> instead of one");
    let start = text.find(start).context("no start")?;
    let length = text[start..].find(end).context("no end of the element")?;
    Ok(&text[start..start + length + end.len()])
}

/// Asks libvirt's schema about a domain, which is written to `file`.
fn validate(domain: &str, file: &Path) -> Result<String> {
    fs::write(file, domain).context("writing a domain")?;
    process::output(Command::new("virt-xml-validate").arg(file).arg("domain"))
}
