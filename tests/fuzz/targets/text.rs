//! Texts from users: endpoints, virtual machines, sizes.

use vgpu_executor::size;
use vgpu_executor::vm::VmOptions;
use vgpu_transport::link::Endpoint;

pub(crate) fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match text.parse::<Endpoint>() {
        Ok(endpoint) => {
            let said = endpoint.to_string();
            assert_eq!(
                said.parse::<Endpoint>().expect("the displayed endpoint"),
                endpoint,
                "{text:?}"
            );
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match text.parse::<VmOptions>() {
        Ok(options) => {
            assert!(options.socket.is_absolute() && options.window.is_power_of_two());
            assert!(!options.name.is_empty() && !options.name.contains(['/', ' ', '\n']));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Err(error) = size::parse(text) {
        assert!(!error.to_string().is_empty());
    }
}
