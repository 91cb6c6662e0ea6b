//! Configuration files: accepted, or refused with the position of the error.

use vgpu_executor::config::Settings;

pub(crate) fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match Settings::parse(text) {
        Ok(settings) => {
            assert!(settings.max_guests > 0);
            let settings = settings.with_default_listener();
            assert!(settings.needs_restart(&settings).is_empty());
            let mut names: Vec<_> = settings
                .guests
                .iter()
                .map(|guest| &guest.rule.name)
                .collect();
            let count = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), count, "a duplicate name in {text:?}");
        }
        Err(problem) => assert!(!problem.to_string().is_empty()),
    }
}
