//! include/pagedkv.h is generated: cbindgen writes one section a file of src/abi, here they are put in reading order. The test fails where the checked-in
//! header differs; PAGEDKV_UPDATE_HEADER=1 writes it.

use cbindgen::{Builder, Config};
use std::path::Path;

/// Reading order: file of src/abi and the section's title.
const SECTIONS: &[(&str, &str)] = &[
    ("version", "Versions"),
    ("status", "Status and errors"),
    ("types", "Buffers, streams, tensors"),
    ("context", "Context"),
    ("collection", "Paged KV collection"),
    ("batch", "Ragged batch"),
    ("kv", "Store and gather"),
    ("weight", "GGUF weights"),
    ("qkv", "QKV projection"),
    ("rope", "RoPE + RMSNorm + quantise"),
    ("prefill", "FP8 MLA prefill"),
    ("indexer", "FP8 MLA indexer"),
    ("merge", "Merge of partial attention"),
];

fn section(root: &Path, file: &str, title: &str) -> String {
    let mut config = Config::from_file(root.join("include/cbindgen.toml")).unwrap();
    // A section's structs belong to it whether or not one of its functions takes them.
    let source = std::fs::read_to_string(root.join(format!("src/abi/{file}.rs"))).unwrap();
    config.export.include = source
        .lines()
        .filter_map(|l| l.strip_prefix("pub struct ")?.split([' ', '(']).next().map(str::to_string))
        .collect();
    let mut text = Vec::new();
    Builder::new()
        .with_config(config)
        .with_src(root.join(format!("src/abi/{file}.rs")))
        .generate()
        .unwrap()
        .write(&mut text);
    let text = String::from_utf8(text).unwrap();
    format!("\n// ---- {title} {}\n\n{}\n", "-".repeat(140 - title.len()), tidy(text.trim()))
}

/// Runs of #define without a comment between them stand together, and no line ends in a blank.
fn tidy(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        let between = line.is_empty() && i > 0 && lines[i - 1].starts_with("#define");
        if between
            && lines.get(i + 1).is_some_and(|next| {
                next.starts_with("#define") || next.starts_with("//") && defines_follow(&lines[i + 1..])
            })
        {
            continue;
        }
        out.push_str(line);
        out.push('\n');
    }
    out.trim_end().to_string()
}

fn defines_follow(lines: &[&str]) -> bool {
    lines.iter().find(|l| !l.starts_with("//")).is_some_and(|l| l.starts_with("#define"))
}

fn generate(root: &Path) -> String {
    let prologue = std::fs::read_to_string(root.join("include/prologue.h")).unwrap();
    let mut out = prologue.trim_end().to_string() + "\n";
    for (file, title) in SECTIONS {
        out += &section(root, file, title);
    }
    out + "\n#ifdef __cplusplus\n}\n#endif\n#endif\n"
}

#[test]
fn the_checked_in_header_is_the_generated_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("include/pagedkv.h");
    let want = generate(root);
    if std::env::var_os("PAGEDKV_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &want).unwrap();
    }
    let have = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = have.lines().zip(want.lines()).position(|(a, b)| a != b);
    assert!(
        have == want,
        "include/pagedkv.h differs from src/abi at line {differs:?}; PAGEDKV_UPDATE_HEADER=1 cargo test --test header writes it"
    );
}

#[test]
fn every_abi_file_is_a_section() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for entry in std::fs::read_dir(root.join("src/abi")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let stem = name.trim_end_matches(".rs");
        assert!(
            stem == "mod" || SECTIONS.iter().any(|(file, _)| *file == stem),
            "src/abi/{name} is in no section of the header"
        );
    }
}
