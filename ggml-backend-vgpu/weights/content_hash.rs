//! The BLAKE3 hash of bytes in memory that another process may write to.

use vgpu_transport::bytes::Bytes;
use vgpu_transport::wire::ContentHash;

/// Bytes that are copied and hashed at once.
const CHUNK: usize = 64 << 10;

/// The BLAKE3 hash of `data`. Each byte is read once.
pub(crate) fn content_hash(data: Bytes<'_>) -> ContentHash {
    hash(blake3::Hasher::new(), data)
}

/// The keyed BLAKE3 hash of `data`. Each byte is read once.
pub(crate) fn keyed_hash(key: &ContentHash, data: Bytes<'_>) -> ContentHash {
    hash(blake3::Hasher::new_keyed(&key.0), data)
}

fn hash(mut hasher: blake3::Hasher, data: Bytes<'_>) -> ContentHash {
    let mut chunk = vec![0; CHUNK];
    let mut rest = data;
    while !rest.is_empty() {
        let (part, behind) = rest.split_at(rest.len().min(CHUNK));
        let chunk = &mut chunk[..part.len()];
        part.copy_to(chunk);
        hasher.update(chunk);
        rest = behind;
    }
    ContentHash(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashing_in_chunks_gives_the_hash_of_the_whole_content() {
        let data: Vec<u8> = (0..CHUNK * 2 + 7).map(|i| ((i * i) >> 3) as u8).collect();
        let expected = *blake3::hash(&data).as_bytes();
        assert_eq!(content_hash(data[..].into()).0, expected);
        let key = [7; 32];
        let expected = *blake3::keyed_hash(&key, &data).as_bytes();
        assert_eq!(keyed_hash(&ContentHash(key), data[..].into()).0, expected);
    }
}
