//! Weights kept on disk: used after a restart, verified, limited.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::model::{for_weights, hash, lookup, read_all};
use common::wait_for;
use common::weights::{FIRST, MODEL, SECOND, first, guest, host, load, model, parts};
use vgpu_executor::WeightStore;
use vgpu_executor::weights::{CacheOptions, Sharing};

/// A private folder of a test.
struct Folder(PathBuf, #[allow(dead_code)] tempfile::TempDir);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        Folder(folder.path().join("weights"), folder)
    }

    fn cache(&self, size: u64) -> Option<CacheOptions> {
        Some(CacheOptions {
            folder: self.0.clone(),
            size,
        })
    }

    fn files(&self) -> Vec<PathBuf> {
        fn walk(path: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                match entry.path() {
                    path if path.is_dir() => walk(&path, found),
                    path => found.push(path),
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.0, &mut found);
        found
    }
}

#[test]
fn cached_model_is_not_sent_again_after_a_restart() {
    let folder = Folder::new("weights-restart");
    let model = model(11);
    {
        let (host, weights) = host(Sharing::Tenant, folder.cache(1 << 30));
        let (_one, _) = first(&host, &weights, 7, &model);
        wait_for("writing", || weights.stats().disk_bytes == FIRST + SECOND);
    }
    // A temporary file that an earlier process left when it crashed.
    let [one, _] = &folder.files()[..] else {
        panic!("{:?}", folder.files());
    };
    let unfinished = one.with_file_name("new-1-1");
    fs::write(&unfinished, &model[..100]).unwrap();
    let (host, weights) = host(Sharing::Tenant, folder.cache(1 << 30));
    assert!(!unfinished.exists());
    let mut two = guest(&host, 7);
    let (two_has, not_sent) = load(&mut two, &model);
    assert_eq!(not_sent, FIRST + SECOND);
    assert!(read_all(&mut two, two_has, MODEL) == model);
    assert_eq!(weights.stats().from_disk, FIRST + SECOND);
    // From here on the extent is in memory and is shared.
    wait_for("hashing", || weights.stats().extents == 2);
    let mut three = guest(&host, 7);
    assert_eq!(load(&mut three, &model).1, FIRST + SECOND);
    assert_eq!(weights.stats().from_disk, FIRST + SECOND);
    // Other users have no access to the extents on disk.
    let mut other = guest(&host, 8);
    let (buffer, lengths) = for_weights(&mut other, MODEL);
    assert!(lengths.is_empty(), "{lengths:?}");
    assert!(!lookup(&mut other, buffer, 0, parts(&model)[0].1));
}

#[test]
fn modified_cache_file_is_removed() {
    let folder = Folder::new("weights-damage");
    let model = model(12);
    {
        let (host, weights) = host(Sharing::Tenant, folder.cache(1 << 30));
        let (_one, _) = first(&host, &weights, 7, &model);
        wait_for("writing", || weights.stats().disk_bytes == FIRST + SECOND);
    }
    // A changed bit in one file, a truncated other file.
    for path in folder.files() {
        let mut content = fs::read(&path).unwrap();
        match content.len() as u64 == FIRST {
            true => content[777] ^= 4,
            false => content.truncate(content.len() - 1),
        }
        fs::write(&path, content).unwrap();
    }
    let (host, weights) = host(Sharing::Tenant, folder.cache(1 << 30));
    let mut two = guest(&host, 7);
    let (two_has, not_sent) = load(&mut two, &model);
    assert_eq!(not_sent, 0);
    assert!(read_all(&mut two, two_has, MODEL) == model);
    assert_eq!(weights.stats().from_disk, 0);
}

#[test]
fn cache_stays_within_its_size_and_evicts_the_least_recently_used() {
    let folder = Folder::new("weights-size");
    let models: Vec<Vec<u8>> = (20..23).map(model).collect();
    let both = FIRST + SECOND;
    let (host, weights) = host(Sharing::Tenant, folder.cache(2 * both));
    for (i, model) in models.iter().enumerate() {
        let mut guest = guest(&host, 7);
        load(&mut guest, model);
        wait_for("writing", || {
            weights.stats().disk_bytes >= both * (i as u64 + 1).min(2)
        });
        wait_for("hashing", || {
            weights.stats().hashed == both * (i as u64 + 1)
        });
        drop(guest);
        host.wait_until_empty();
        if i == 1 {
            // The first file is used again, so the second one is the least recently used.
            let mut guest = self::guest(&host, 7);
            assert_eq!(load(&mut guest, &models[0]).1, both);
            wait_for("hashing", || weights.stats().extents == 2);
            drop(guest);
            host.wait_until_empty();
            // The host has also hashed the bytes of this guest.
            wait_for("hashing", || weights.stats().hashed == both * 3);
        }
        assert!(weights.stats().disk_bytes <= 2 * both);
        if i == 1 {
            break;
        }
    }
    let before = weights.stats().hashed;
    let mut third = guest(&host, 7);
    load(&mut third, &models[2]);
    wait_for("hashing", || weights.stats().hashed == before + both);
    let names = parts(&models[2]).map(|(_, part)| hash(part).to_string());
    let is_written = |name: &String| folder.files().iter().any(|file| file.ends_with(name));
    wait_for("writing", || names.iter().all(is_written));
    drop(third);
    host.wait_until_empty();
    let on_disk: u64 = folder
        .files()
        .iter()
        .map(|f| f.metadata().unwrap().len())
        .sum();
    assert_eq!((on_disk, weights.stats().disk_bytes), (2 * both, 2 * both));
    let mut guest = guest(&host, 7);
    assert_eq!(load(&mut guest, &models[1]).1, 0, "used longest ago");
    drop(guest);
}

#[test]
fn cache_folder_writable_by_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("weights-open");
    fs::create_dir_all(&folder.0).unwrap();
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).unwrap();
    let error = WeightStore::new(Sharing::Tenant, folder.cache(1 << 30))
        .err()
        .unwrap();
    assert!(error.to_string().contains("777"), "{error}");
    let file = folder.0.join("file");
    fs::write(&file, "").unwrap();
    let under_a_file = CacheOptions {
        folder: file.join("x"),
        size: 1,
    };
    assert!(WeightStore::new(Sharing::Tenant, Some(under_a_file)).is_err());
}
