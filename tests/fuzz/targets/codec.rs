//! Messages in both directions. Each decoded message encodes to the same bytes; other bytes are
//! refused.

use vgpu_transport::wire::{Reply, Request};

pub(crate) fn run(data: &[u8]) {
    let mut again = Vec::new();
    if let Ok(request) = Request::decode(data) {
        request.encode(&mut again);
        assert_eq!(again, data, "{request:?}");
        for cut in 0..data.len() {
            assert!(
                Request::decode(&data[..cut]).is_err(),
                "{cut} bytes of {request:?}"
            );
        }
    }
    if let Ok(reply) = Reply::decode(data) {
        again.clear();
        reply.encode(&mut again);
        // Capabilities are decoded in any order and encoded in a fixed one.
        assert_eq!(Reply::decode(&again).as_ref(), Ok(&reply));
    }
}
