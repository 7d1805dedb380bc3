//! A machine with one device, simulated by the test driver.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use penstock_cuda::{Device, Driver, Stream};
use penstock_cuda_fake::Control;
use penstock_io::buffer::DeviceStreams;
use penstock_io::faulty::LentDevice;

/// The test driver, its device, and a stream as a training would have.
pub(crate) struct Machine {
    pub(crate) control: Control,
    device: Arc<Device>,
    pub(crate) device_streams: Arc<DeviceStreams>,
    pub(crate) theirs: Arc<Stream>,
}

/// One driver serves all tests, as in a program; each test uses it exclusively.
pub(crate) fn machine() -> MutexGuard<'static, Machine> {
    static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
        let control = Control::new();
        let driver = Driver::open(&penstock_cuda_fake::library()).unwrap();
        let device = driver.device(0).unwrap();
        let machine = Machine {
            control,
            device: Arc::clone(&device),
            device_streams: Arc::new(DeviceStreams::new(&device).unwrap()),
            theirs: Arc::new(Stream::new(&device).unwrap()),
        };
        Mutex::new(machine)
    });
    let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    machine.control.clear_faults();
    machine.draw(1, 0);
    machine
}

impl Machine {
    /// Gives streams random delays.
    pub(crate) fn draw(&mut self, seed: u64, delay_us_max: u64) {
        self.control.set_seed(seed);
        self.control.set_delay_us_max(delay_us_max);
        self.device_streams = Arc::new(DeviceStreams::new(&self.device).unwrap());
        self.theirs = Arc::new(Stream::new(&self.device).unwrap());
    }

    pub(crate) fn lent(&self, content: &[u8]) -> LentDevice {
        LentDevice::new(&self.device_streams, &self.theirs, content).unwrap()
    }
}
