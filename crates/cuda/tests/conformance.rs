//! Runs the suite for drivers: on the fake driver, and on a real one where there is one.

use penstock_cuda::{Driver, Error, conformance};
use penstock_cuda_fake::Control;

#[test]
fn ours_for_tests() {
    let control = Control::new();
    for (seed, delay_us) in [(1, 0), (2, 50), (3, 500)] {
        control.reset();
        control.set_seed(seed);
        control.set_delay_us_max(delay_us);
        eprintln!("seed {seed}, delays of up to {delay_us} us");
        let driver = Driver::open(&penstock_cuda_fake::library()).unwrap();
        conformance::run(&driver);
        let left = control.leaks();
        assert_eq!(left, Default::default());
    }
}

#[test]
fn the_systems() {
    match Driver::open("libcuda.so.1".as_ref()) {
        Ok(driver) => conformance::run(&driver),
        Err(error @ (Error::NotFound { .. } | Error::NoDevice)) => eprintln!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    }
}
