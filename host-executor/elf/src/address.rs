//! Reads the address that a function loads from its instructions.

/// The address computed by `lea DISPLACEMENT(%rip), %rax`.
pub(crate) fn x86_64_address(code: &[u8], start: u64) -> Option<u64> {
    let at = find(code, &[0x48, 0x8d, 0x05])?;
    let displacement = i32::from_le_bytes(code.get(at + 3..at + 7)?.try_into().ok()?);
    // Relative to the next instruction.
    start
        .checked_add(at as u64 + 7)?
        .checked_add_signed(displacement.into())
}

/// The address computed by `adrp x0, PAGE; add x0, x0, #OFFSET`.
pub(crate) fn aarch64_address(code: &[u8], start: u64) -> Option<u64> {
    let words: Vec<u32> = code
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect();
    let at = words
        .iter()
        .position(|word| word & 0x9f00_001f == 0x9000_0000)?;
    let adrp = words[at];
    let pages = i64::from(adrp >> 5 & 0x7_ffff) << 2 | i64::from(adrp >> 29 & 3);
    let pages = pages << 43 >> 43; // 21 bits, signed
    let page = (start.checked_add(4 * at as u64)? & !0xfff).checked_add_signed(pages << 12)?;
    let add = words[at + 1..]
        .iter()
        .find(|word| *word & 0xffc0_03ff == 0x9100_0000)?;
    page.checked_add(u64::from(add >> 10 & 0xfff))
}

/// Where `what` begins in `data`.
pub(crate) fn find(data: &[u8], what: &[u8]) -> Option<usize> {
    let first = *what.first()?;
    let mut from = 0;
    while let Some(at) = data[from..].iter().position(|&byte| byte == first) {
        let at = from + at;
        if data[at..].starts_with(what) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_that_load_an_address_are_read() {
        // endbr64; lea 0x100(%rip), %rax; ret
        let code = [0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x8d, 0x05, 0, 1, 0, 0, 0xc3];
        assert_eq!(x86_64_address(&code, 0x1000), Some(0x1000 + 11 + 0x100));
        let back = [0x48, 0x8d, 0x05, 0xf0, 0xff, 0xff, 0xff, 0xc3];
        assert_eq!(x86_64_address(&back, 0x1000), Some(0x1000 + 7 - 16));
        assert_eq!(x86_64_address(&[0xc3; 16], 0x1000), None);
        assert_eq!(x86_64_address(&code[..8], 0x1000), None, "cut off");

        let words = |words: &[u32]| {
            words
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        // adrp x0, . + 2 pages; add x0, x0, #0x123; ret
        let code = words(&[0xd000_0000, 0x9104_8c00, 0xd65f_03c0]);
        assert_eq!(aarch64_address(&code, 0x5678), Some(0x7123));
        // adrp x0, . - 1 page
        let code = words(&[0xd503_245f, 0xf0ff_ffe0, 0x9100_0400]);
        assert_eq!(aarch64_address(&code, 0x5678), Some(0x4001));
        assert_eq!(aarch64_address(&words(&[0xd65f_03c0]), 0), None);
    }
}
