//! The packets of the handshake. The first word of each is [`MAGIC`](crate::link::packet::MAGIC).

/// The words of a hello: magic, lowest and highest supported layout, wanted window size (0: the
/// host chooses).
pub(super) const HELLO_WORDS: usize = 4;

/// The words of a welcome: magic, verdict, chosen layout, window size.
pub(super) const WELCOME_WORDS: usize = 4;

/// The files of a welcome: the window, the guest's eventfd, the host's eventfd.
pub(super) const WELCOME_FILES: usize = 3;

/// The words of an opened: magic, epoch.
pub(super) const OPENED_WORDS: usize = 2;

/// The verdict of a welcome: the session begins.
pub(super) const VERDICT_ACCEPTED: u64 = 0;

/// The verdict of a welcome: the host supports none of the guest's layouts.
pub(super) const VERDICT_OTHER_LAYOUT: u64 = 1;
