fn main() {
    println!("cargo::rerun-if-changed=cmake/build.rs");
}
