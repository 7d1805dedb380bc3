//! A machine with devices, simulated by the test driver.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use penstock_cuda::{Device, Driver, Stream};
use penstock_cuda_fake::Control;
use penstock_io::buffer::DeviceStreams;
use penstock_io::faulty::LentDevice;

/// The test driver, its two devices, and a stream of a training on the first.
pub struct Machine {
    pub control: Control,
    pub device: Arc<Device>,
    pub second: Arc<Device>,
    pub device_streams: Arc<DeviceStreams>,
    pub theirs: Arc<Stream>,
}

/// One driver serves all tests, as in a program; each test has exclusive use of it.
pub fn machine() -> MutexGuard<'static, Machine> {
    static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
        let control = Control::new();
        control.set_devices(2);
        let driver = Driver::open(&penstock_cuda_fake::library()).unwrap();
        let device = driver.device(0).unwrap();
        let machine = Machine {
            control,
            device: Arc::clone(&device),
            second: driver.device(1).unwrap(),
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
    /// Sets random delays for the streams.
    pub fn draw(&mut self, seed: u64, delay_us_max: u64) {
        self.control.set_seed(seed);
        self.control.set_delay_us_max(delay_us_max);
        self.device_streams = Arc::new(DeviceStreams::new(&self.device).unwrap());
        self.theirs = Arc::new(Stream::new(&self.device).unwrap());
    }

    pub fn lent(&self, content: &[u8]) -> LentDevice {
        LentDevice::new(&self.device_streams, &self.theirs, content).unwrap()
    }
}
