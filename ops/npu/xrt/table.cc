// SPDX-License-Identifier: Apache-2.0
// libflownpu_xrt.so: the functions of ../driver/xrt_abi.h over XRT.
#include <dlfcn.h>
#include <unistd.h>
#include <xrt/experimental/xrt_ext.h>
#include <xrt/experimental/xrt_system.h>
#include <xrt/experimental/xrt_version.h>
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>

#include <cstring>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "ops/npu/driver/xrt_abi.h"
#include "ops/npu/xrt/dispatch.h"
#include "ops/npu/xrt/status.h"

namespace flownpu::npu::xrt_abi {

struct Device {
  xrt::device device;
};

namespace {

// The first version with xrt::ext::bo and runlists for NPUs.
constexpr unsigned int kOldest = XRT_VERSION(2, 19);

std::string version_text(unsigned int code) {
  return std::to_string(XRT_MAJOR(code)) + "." + std::to_string(XRT_MINOR(code));
}

// Parts of XRT that are not linked but loaded at run time: its core, and the core's part for NPUs.
constexpr const char* kCore = "libxrt_core.so.2";
constexpr const char* kNpuPart = "libxrt_driver_xdna.so.2";

// Exists as long as the driver is loaded, whether or not it has started an NPU.
constexpr const char* kDriver = "/sys/bus/pci/drivers/amdxdna";

bool is_loaded(const char* library) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

// Why the loader did not load a library. The loader's message names the file that it did not find:
// the library, or one that the library needs.
std::string loaders_reason(const char* library) {
  if (dlopen(library, RTLD_LAZY) != nullptr) return "the loader finds it, XRT did not look there";
  const char* const error = dlerror();
  return error == nullptr ? "no reason given" : error;
}

unsigned int count_devices() {
  unsigned int count = 0;
  try {
    count = xrt::system::enumerate_devices();
  } catch (const std::exception& error) {
    if (is_loaded(kCore)) throw;
    throw StatusError(Status::kIncomplete, error.what());
  }
  if (count == 0 && is_loaded(kCore) && !is_loaded(kNpuPart)) {
    throw StatusError(Status::kIncomplete, std::string("XRT has not loaded ") + kNpuPart + " (" +
                                               loaders_reason(kNpuPart) + ")");
  }
  return count;
}

// "an NPU" if XRT does not find the name: after a device could not be opened in this process, XRT
// looks in the wrong place in sysfs.
std::string name_of(const xrt::device& device) {
  try {
    return device.get_info<xrt::info::device::name>();
  } catch (const std::exception&) {
    return "an NPU";
  }
}

// ", firmware 255.0.5.35"; empty if the driver does not say. XRT tells the version only to its own
// programs, so it is read from sysfs.
std::string firmware_of(const xrt::device& device) {
  std::string version;
  try {
    const std::string place = device.get_info<xrt::info::device::bdf>();
    std::ifstream("/sys/bus/pci/devices/" + place + "/fw_version") >> version;
  } catch (const std::exception&) {
    return "";
  }
  return version.empty() ? version : ", firmware " + version;
}

template <typename Object>
void free(Object* object) {
  delete object;
}

Status open_device(Device** device, Text description, Text error) {
  return guard(Stage::kOpen, error, [&] {
    free_abandoned();
    const unsigned int code = xrt::version::code();
    if (code < kOldest) {
      throw StatusError(Status::kTooOld, "expected XRT " + version_text(kOldest) +
                                             " or newer, found " + version_text(code));
    }
    if (count_devices() == 0) {
      if (access(kDriver, F_OK) != 0) throw StatusError(Status::kNoDevice, "XRT finds no NPU");
      throw StatusError(Status::kNotStarted,
                        "XRT finds no NPU, though the driver amdxdna is loaded");
    }
    auto opened = std::make_unique<Device>(Device{xrt::device(0)});
    write(description,
          name_of(opened->device) + firmware_of(opened->device) + ", XRT " + version_text(code));
    *device = opened.release();
  });
}

Status load_array(Device* device, const char* file, Array** array, std::size_t* most_buffers,
                  Text error) {
  return guard(Stage::kLoad, error, [&] {
    auto context = std::make_shared<Context>(device->device, file);
    *most_buffers = context->most_buffers;
    *array = new Array{std::move(context)};
  });
}

Status make_sequence(Array* array, const std::uint32_t* words, std::size_t count,
                     Sequence** sequence, Text error) {
  return guard(Stage::kAllocate, error, [&] {
    if (count == 0) throw StatusError(Status::kDesign, "expected instructions, got none");
    *sequence = new Sequence{std::make_shared<Instructions>(*array->context, words, count)};
  });
}

Status write_word(Sequence* sequence, std::size_t word, std::uint32_t value, Text error) {
  return guard(Stage::kSubmit, error, [&] {
    if (sequence->instructions.use_count() > 1) {
      throw StatusError(Status::kSubmit,
                        "its instructions cannot be changed while it is under way");
    }
    sequence->instructions->write(word, value);
  });
}

Status make_buffer(Device* device, std::size_t bytes, Buffer** buffer, void** host, Text error) {
  return guard(Stage::kAllocate, error, [&] {
    // Memory of the host, which the array reads and writes in place.
    auto made = std::make_unique<Buffer>(Buffer{xrt::ext::bo(device->device, bytes)});
    *host = made->buffer.map();
    std::memset(*host, 0, bytes);
    made->buffer.sync(XCL_BO_SYNC_BO_TO_DEVICE, bytes, 0);
    *buffer = made.release();
  });
}

Status move(Buffer* buffer, Direction direction, std::size_t offset, std::size_t bytes,
            Text error) {
  return guard(Stage::kMove, error, [&] {
    buffer->buffer.sync(
        direction == Direction::kToDevice ? XCL_BO_SYNC_BO_TO_DEVICE : XCL_BO_SYNC_BO_FROM_DEVICE,
        bytes, offset);
  });
}

constexpr Table kTable = {
    .version = kVersion,
    .open_device = open_device,
    .free_device = free<Device>,
    .load_array = load_array,
    .free_array = free<Array>,
    .make_sequence = make_sequence,
    .write_word = write_word,
    .free_sequence = free<Sequence>,
    .make_buffer = make_buffer,
    .move = move,
    .free_buffer = free<Buffer>,
    .run = run,
};

}  // namespace
}  // namespace flownpu::npu::xrt_abi

extern "C" __attribute__((visibility("default"))) const flownpu::npu::xrt_abi::Table*
flownpu_xrt_table() {
  return &flownpu::npu::xrt_abi::kTable;
}
