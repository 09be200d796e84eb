//! The golden cases on the CPU, at every instruction set.

#[path = "support/api.rs"]
mod api;
#[path = "support/cases.rs"]
mod cases;

#[test]
fn every_golden_case_holds() {
    let ran = cases::run(&pagedkv::cpu::isa::Level::ALL, |_| true);
    assert_eq!(ran.len(), 7, "cases of every function: {ran:?}");
}
