//! The versions of the messages: which ones this build serves, what differs between them, and how
//! two sides choose one.
//!
//! The guest names a range in HELLO, the host answers WELCOME with the newest version that both
//! speak, and all further messages are of that version. HELLO, ENDED and the first word of WELCOME
//! are the same in every version, so that two sides of any versions understand each other that far.

use std::fmt;

/// A version of the messages that this build serves: the current one and the previous one.
///
/// A new version is a new variant, and every difference to the version before it is a method of
/// this type, which encoders and decoders ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum ProtocolVersion {
    /// HELLO names this version only. The last version without negotiation.
    V3,
    /// HELLO may name a range and a device. WELCOME names the host's range, and counts the devices
    /// if there are several. Guests leave zero bytes behind quantised weights.
    #[default]
    V4,
}

impl ProtocolVersion {
    /// All served versions, in order.
    pub const ALL: [ProtocolVersion; 2] = [ProtocolVersion::V3, ProtocolVersion::V4];

    /// The oldest served version.
    pub const OLDEST: ProtocolVersion = ProtocolVersion::V3;

    /// The newest served version.
    pub const CURRENT: ProtocolVersion = ProtocolVersion::V4;

    /// The number of the version, as in HELLO and WELCOME.
    pub const fn number(self) -> u32 {
        match self {
            ProtocolVersion::V3 => 3,
            ProtocolVersion::V4 => 4,
        }
    }

    /// The served version with this number.
    pub fn of_number(number: u32) -> Option<ProtocolVersion> {
        let mut all = ProtocolVersion::ALL.into_iter();
        all.find(|version| version.number() == number)
    }

    /// The version of graph images ([`IR_VERSION`](crate::ir::IR_VERSION)) that GRAPH and PATCH
    /// carry.
    pub const fn ir(self) -> u16 {
        match self {
            ProtocolVersion::V3 | ProtocolVersion::V4 => 1,
        }
    }

    /// Whether WELCOME names the versions that the host serves.
    pub(super) const fn welcome_names_range(self) -> bool {
        match self {
            ProtocolVersion::V3 => false,
            ProtocolVersion::V4 => true,
        }
    }

    /// Whether WELCOME counts the devices that the host has for the guest.
    pub(super) const fn welcome_counts_devices(self) -> bool {
        match self {
            ProtocolVersion::V3 => false,
            ProtocolVersion::V4 => true,
        }
    }

    /// Whether the guest places no other tensor in the bytes behind a tensor that
    /// [`Type::row_padding`](crate::ir::Type::row_padding) counts. In a buffer of weights they stay
    /// as the host has allocated them: zero.
    pub const fn pads_rows(self) -> bool {
        match self {
            ProtocolVersion::V3 => false,
            ProtocolVersion::V4 => true,
        }
    }

    /// The newest version that this build and a host have in common, by the host's refusal.
    ///
    /// A host of version 3 refuses every HELLO that names another newest version. A guest that
    /// serves version 3 connects again and names only that one. `None`: there is no such version,
    /// or the host refuses for another reason.
    pub fn after_refusal(reason: &str) -> Option<ProtocolVersion> {
        let host = VersionRange::of_host(reason)?;
        VersionRange::SERVED.newest_in_common(host)
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number().fmt(f)
    }
}

/// The versions that one side serves, from the oldest to the newest. They need not be versions of
/// this build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct VersionRange {
    oldest: u32,
    newest: u32,
}

impl VersionRange {
    /// The versions that this build serves.
    pub const SERVED: VersionRange = VersionRange {
        oldest: ProtocolVersion::OLDEST.number(),
        newest: ProtocolVersion::CURRENT.number(),
    };

    /// The range from `oldest` to `newest`. `None` if it is empty, or if `oldest` does not fit the
    /// 16 bits that HELLO has for it.
    pub fn new(oldest: u32, newest: u32) -> Option<VersionRange> {
        let is_short = oldest == newest || oldest <= u32::from(u16::MAX);
        (0 < oldest && oldest <= newest && is_short).then_some(VersionRange { oldest, newest })
    }

    /// The range of one version.
    pub const fn only(version: ProtocolVersion) -> VersionRange {
        VersionRange {
            oldest: version.number(),
            newest: version.number(),
        }
    }

    /// The oldest version.
    pub fn oldest(self) -> u32 {
        self.oldest
    }

    /// The newest version.
    pub fn newest(self) -> u32 {
        self.newest
    }

    fn newest_in_common(self, other: VersionRange) -> Option<ProtocolVersion> {
        let newest = self.newest.min(other.newest);
        let is_in_common = newest >= self.oldest.max(other.oldest);
        ProtocolVersion::of_number(newest).filter(|_| is_in_common)
    }

    /// The versions that a host names in its refusal, in the words of [`VersionMismatch`] or in
    /// those of a host of version 3. `None`: the host refuses for another reason.
    pub fn of_host(reason: &str) -> Option<VersionRange> {
        let (_, mismatch) = reason.split_once("speaks protocol version")?;
        let (_, host) = mismatch.split_once("this host speaks ")?;
        let (host, _) = host.split_once(':')?;
        let (oldest, newest) = host.split_once(" to ").unwrap_or((host, host));
        VersionRange::new(oldest.parse().ok()?, newest.parse().ok()?)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VersionRange { oldest, newest } = self;
        match oldest == newest {
            true => newest.fmt(f),
            false => write!(f, "{oldest} to {newest}"),
        }
    }
}

/// What HELLO says about versions.
///
/// HELLO has two words for it: the newest version, then the oldest version in the upper half and
/// the version of graph images in the lower half. The upper half is 0 if the range has one version,
/// which is the HELLO of version 3. A host of version 3 compares the first word with its own
/// version before it reads the second, so it refuses a newer guest with both versions in its words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// The versions that the guest serves.
    pub versions: VersionRange,
    /// The version of graph images that belongs to the newest of them.
    pub ir: u16,
}

impl Offer {
    /// What a guest of this build offers.
    pub const SERVED: Offer = Offer {
        versions: VersionRange::SERVED,
        ir: ProtocolVersion::CURRENT.ir(),
    };

    /// One version only.
    pub const fn only(version: ProtocolVersion) -> Offer {
        Offer {
            versions: VersionRange::only(version),
            ir: version.ir(),
        }
    }

    /// The version that a host of this build chooses: the newest that both sides speak.
    ///
    /// # Errors
    ///
    /// A [`VersionMismatch`] if there is none.
    pub fn choose(self) -> Result<ProtocolVersion, VersionMismatch> {
        let (guest, host) = (self.versions, VersionRange::SERVED);
        let version = host.newest_in_common(guest);
        version.ok_or(VersionMismatch { guest, host })
    }

    /// Checks the version that a host names in WELCOME.
    ///
    /// # Errors
    ///
    /// [`VersionNotOffered`], the host's fault, if this offer does not have the version.
    pub fn check(self, chosen: ProtocolVersion) -> Result<(), VersionNotOffered> {
        let offered = self.versions;
        match (offered.oldest..=offered.newest).contains(&chosen.number()) {
            true => Ok(()),
            false => Err(VersionNotOffered { chosen, offered }),
        }
    }

    pub(super) fn words(self) -> [u32; 2] {
        let VersionRange { oldest, newest } = self.versions;
        let oldest = if oldest == newest { 0 } else { oldest };
        [newest, oldest << 16 | u32::from(self.ir)]
    }

    /// The offer in two words of HELLO. The error has the oldest and the newest version, which are
    /// no range of two or more versions.
    pub(super) fn of_words([newest, second]: [u32; 2]) -> Result<Offer, (u32, u32)> {
        let (oldest, ir) = (second >> 16, second as u16);
        let versions = match oldest {
            0 => VersionRange::new(newest, newest),
            oldest if oldest == newest => None,
            oldest => VersionRange::new(oldest, newest),
        };
        let versions = versions.ok_or((oldest, newest))?;
        Ok(Offer { versions, ir })
    }
}

/// A host has chosen a version that the guest has not offered. The host is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the host broke the protocol: it chose protocol version {chosen} in WELCOME, and HELLO offered \
     {offered}"
)]
pub struct VersionNotOffered {
    /// What the host has chosen.
    pub chosen: ProtocolVersion,
    /// What the guest has offered.
    pub offered: VersionRange,
}

/// Two sides have no version in common. The side with the older versions has to be updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the guest speaks protocol version{} {guest}, this host speaks {host}: update ggml-vgpu {}",
    self.plural(),
    self.outdated()
)]
pub struct VersionMismatch {
    /// What the guest speaks.
    pub guest: VersionRange,
    /// What the host speaks.
    pub host: VersionRange,
}

impl VersionMismatch {
    fn plural(&self) -> &'static str {
        match self.guest.oldest == self.guest.newest {
            true => "",
            false => "s",
        }
    }

    /// The side that has to be updated.
    fn outdated(&self) -> &'static str {
        match self.guest.newest < self.host.oldest {
            true => "in the guest",
            false => "on the host",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::IR_VERSION;

    fn range(oldest: u32, newest: u32) -> VersionRange {
        VersionRange::new(oldest, newest).expect("a range")
    }

    fn offer(oldest: u32, newest: u32) -> Offer {
        let versions = range(oldest, newest);
        Offer { versions, ir: 1 }
    }

    #[test]
    fn the_current_and_the_previous_version_are_served() {
        let numbers = ProtocolVersion::ALL.map(ProtocolVersion::number);
        assert_eq!(numbers.first(), Some(&ProtocolVersion::OLDEST.number()));
        assert_eq!(numbers.last(), Some(&ProtocolVersion::CURRENT.number()));
        assert_eq!(numbers[1], numbers[0] + 1, "one after the other");
        for version in ProtocolVersion::ALL {
            assert_eq!(ProtocolVersion::of_number(version.number()), Some(version));
            assert_eq!(u32::from(version.ir()), IR_VERSION);
        }
    }

    #[test]
    fn the_newest_version_in_common_is_chosen() {
        for (oldest, newest, chosen) in [
            (3, 3, ProtocolVersion::V3),
            (1, 3, ProtocolVersion::V3),
            (3, 4, ProtocolVersion::V4),
            (4, 4, ProtocolVersion::V4),
            (4, 5, ProtocolVersion::V4),
            (1, u32::MAX, ProtocolVersion::V4),
        ] {
            let offer = offer(oldest, newest);
            assert_eq!(offer.choose(), Ok(chosen), "{oldest} to {newest}");
        }
    }

    #[test]
    fn a_host_may_choose_what_was_offered() {
        for (oldest, newest, chosen, is_offered) in [
            (3, 4, ProtocolVersion::V3, true),
            (3, 4, ProtocolVersion::V4, true),
            (3, 3, ProtocolVersion::V3, true),
            (3, 3, ProtocolVersion::V4, false),
            (4, 4, ProtocolVersion::V3, false),
        ] {
            let offered = offer(oldest, newest);
            let checked = offered.check(chosen);
            assert_eq!(checked.is_ok(), is_offered, "{chosen} of {offered:?}");
        }
        assert_eq!(
            offer(3, 3)
                .check(ProtocolVersion::V4)
                .unwrap_err()
                .to_string(),
            "the host broke the protocol: it chose protocol version 4 in WELCOME, and HELLO \
             offered 3"
        );
    }

    #[test]
    fn a_mismatch_names_both_ranges_and_the_side_to_update() {
        for (oldest, newest, words) in [
            (
                2,
                2,
                "the guest speaks protocol version 2, this host speaks 3 to 4: update ggml-vgpu \
                 in the guest",
            ),
            (
                8,
                9,
                "the guest speaks protocol versions 8 to 9, this host speaks 3 to 4: update \
                 ggml-vgpu on the host",
            ),
        ] {
            let mismatch = offer(oldest, newest).choose().unwrap_err();
            assert_eq!(mismatch.to_string(), words);
            let read = VersionRange::of_host(&mismatch.to_string());
            assert_eq!(read, Some(VersionRange::SERVED));
        }
    }

    #[test]
    fn a_refusal_tells_the_version_to_try_next() {
        let old = "the guest broke the protocol: the guest speaks protocol version 4, this host \
                   speaks 3: update the older of the two";
        assert_eq!(
            ProtocolVersion::after_refusal(old),
            Some(ProtocolVersion::V3)
        );
        for (host, next) in [
            ("2", None),
            ("4", Some(ProtocolVersion::V4)),
            ("3 to 9", Some(ProtocolVersion::V4)),
            ("5 to 6", None),
            ("6 to 5", None),
            ("0", None),
            ("many", None),
        ] {
            let reason = old.replace("speaks 3:", &format!("speaks {host}:"));
            assert_eq!(ProtocolVersion::after_refusal(&reason), next, "{host}");
        }
        let other = "the host already serves 64 guests, its limit is 64";
        assert_eq!(ProtocolVersion::after_refusal(other), None);
        let graphs = old.replace("protocol version", "graph IR version");
        assert_eq!(ProtocolVersion::after_refusal(&graphs), None);
    }

    #[test]
    fn an_offer_has_one_form_and_a_wrong_range_none() {
        assert_eq!(Offer::only(ProtocolVersion::V3).words(), [3, 1]);
        assert_eq!(Offer::SERVED.words(), [4, 3 << 16 | 1]);
        for offer in [
            Offer::SERVED,
            Offer::only(ProtocolVersion::V3),
            offer(u32::from(u16::MAX), u32::MAX),
            offer(u32::MAX, u32::MAX),
        ] {
            assert_eq!(Offer::of_words(offer.words()), Ok(offer));
        }
        for [newest, oldest] in [[3, 4], [4, 4], [0, 0], [0, 1], [1, 0xffff]] {
            let wrong = Offer::of_words([newest, oldest << 16 | 1]);
            assert_eq!(wrong, Err((oldest, newest)));
        }
        assert_eq!(VersionRange::new(0, 3), None);
        assert_eq!(VersionRange::new(1 << 16, 1 << 17), None);
    }
}
