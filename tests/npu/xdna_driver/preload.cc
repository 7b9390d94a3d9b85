// SPDX-License-Identifier: Apache-2.0
// A double of the kernel's driver amdxdna, as a library that is loaded before the C library
// (LD_PRELOAD): /dev/accel/accel0 opens as a device of ours, and sysfs is read in a folder that the
// environment variable XDNA_DRIVER_ROOT names and the test fills. All other calls go to the C
// library.
//
// It is written from the kernel's public interface and steered through state.h; real XRT runs on it
// unchanged. It cannot show what a real driver, firmware or array does.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tests/npu/xdna_driver/device_file.h"
#include "tests/npu/xdna_driver/state.h"

namespace {

using xdna_driver::machine_root;

// The paths that XRT and FlowNPU look up about a device; all other paths stay as they are.
constexpr std::array<std::string_view, 7> kRedirected = {
    "/sys/bus/",  "/sys/module/amdxdna",  "/sys/class/accel", "/sys/devices/pci",
    "/dev/accel", "/lib/firmware/amdnpu", "/lib/modules"};
constexpr std::string_view kDevice = "/dev/accel/accel";
// More than tests allocate; a file without content takes no room.
constexpr off_t kMemory = off_t{1} << 42;

template <typename Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// The place where a file is searched instead of `path`.
class Redirected {
 public:
  explicit Redirected(const char* path) : path_(path) {
    if (path == nullptr || path[0] != '/' || std::strchr("sdl", path[1]) == nullptr) return;
    for (const std::string_view prefix : kRedirected) {
      if (!machine_root().empty() && std::string_view(path).substr(0, prefix.size()) == prefix) {
        elsewhere_ = machine_root() + path;
        path_ = elsewhere_.c_str();
      }
    }
  }
  operator const char*() const { return path_; }  // NOLINT: stands for the path

 private:
  std::string elsewhere_;
  const char* path_;
};

struct OpenFiles {
  std::mutex mutex;
  std::map<int, std::shared_ptr<xdna_driver::DeviceFile>> files;
};

// Never destroyed: the plugin may keep the device open until the process ends.
OpenFiles& open_files() {
  static auto* const instance = new OpenFiles;
  return *instance;
}

std::shared_ptr<xdna_driver::DeviceFile> device_file(int file) {
  if (machine_root().empty()) return nullptr;
  const std::lock_guard lock(open_files().mutex);
  const auto found = open_files().files.find(file);
  return found == open_files().files.end() ? nullptr : found->second;
}

bool is_device(const char* path) {
  return path != nullptr && !machine_root().empty() &&
         std::string_view(path).substr(0, kDevice.size()) == kDevice;
}

int fail_with(int number) {
  errno = number;
  return -1;
}

bool is_forbidden() { return xdna_driver::setting("forbidden", 0) != 0; }

int open_device() {
  if (is_forbidden()) return fail_with(EACCES);
  if (const auto number = xdna_driver::struck("open")) return fail_with(static_cast<int>(*number));
  const int file = memfd_create("accel0", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kMemory) != 0) return fail_with(ENOMEM);
  const std::lock_guard lock(open_files().mutex);
  open_files().files[file] = std::make_shared<xdna_driver::DeviceFile>(file);
  return file;
}

int open_as(const char* name, const char* path, int flags, mode_t mode) {
  if (is_device(path)) return open_device();
  return next<int (*)(const char*, int, mode_t)>(name)(Redirected(path), flags, mode);
}

int open_at_as(const char* name, int folder, const char* path, int flags, mode_t mode) {
  if (is_device(path)) return open_device();
  return next<int (*)(int, const char*, int, mode_t)>(name)(folder, Redirected(path), flags, mode);
}

template <typename Stat>
int look_at_as(const char* name, const char* path, Stat* found) {
  return next<int (*)(const char*, Stat*)>(name)(Redirected(path), found);
}

mode_t mode_of(int flags, va_list list) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
}

void* map_as(const char* name, void* at, std::size_t size, int protection, int flags, int file,
             off_t offset) {
  if (file >= 0 && (flags & MAP_LOCKED) != 0 && device_file(file) != nullptr) {
    // Locking memory may be forbidden on the test machine, so the flag is dropped.
    if (const auto number = xdna_driver::struck("lock memory")) {
      errno = static_cast<int>(*number);
      return MAP_FAILED;
    }
    flags &= ~MAP_LOCKED;
  }
  return next<void* (*)(void*, std::size_t, int, int, int, off_t)>(name)(at, size, protection,
                                                                         flags, file, offset);
}

char* real_path_as(const char* path, char* resolved) {
  char* const found = next<char* (*)(const char*, char*)>("realpath")(Redirected(path), resolved);
  // A path below our folder becomes one of the machine's again.
  if (found != nullptr && !machine_root().empty() &&
      machine_root().compare(0, machine_root().size(), found, machine_root().size()) == 0) {
    std::memmove(found, found + machine_root().size(),
                 std::strlen(found) - machine_root().size() + 1);
  }
  return found;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return open_as("open", path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return open_as("open64", path, flags, mode);
}

int openat(int folder, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return open_at_as("openat", folder, path, flags, mode);
}

int openat64(int folder, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = mode_of(flags, list);
  va_end(list);
  return open_at_as("openat64", folder, path, flags, mode);
}

FILE* fopen(const char* path, const char* mode) {
  return next<FILE* (*)(const char*, const char*)>("fopen")(Redirected(path), mode);
}

FILE* fopen64(const char* path, const char* mode) {
  return next<FILE* (*)(const char*, const char*)>("fopen64")(Redirected(path), mode);
}

DIR* opendir(const char* path) { return next<DIR* (*)(const char*)>("opendir")(Redirected(path)); }

int stat(const char* path, struct stat* found) { return look_at_as("stat", path, found); }

int stat64(const char* path, struct stat64* found) { return look_at_as("stat64", path, found); }

int lstat(const char* path, struct stat* found) { return look_at_as("lstat", path, found); }

int lstat64(const char* path, struct stat64* found) { return look_at_as("lstat64", path, found); }

int fstatat64(int folder, const char* path, struct stat64* found, int flags) {
  return next<int (*)(int, const char*, struct stat64*, int)>("fstatat64")(folder, Redirected(path),
                                                                           found, flags);
}

int access(const char* path, int mode) {
  if (is_device(path) && is_forbidden() && (mode & (R_OK | W_OK)) != 0) return fail_with(EACCES);
  return next<int (*)(const char*, int)>("access")(Redirected(path), mode);
}

ssize_t readlink(const char* path, char* link, std::size_t size) {
  return next<ssize_t (*)(const char*, char*, std::size_t)>("readlink")(Redirected(path), link,
                                                                        size);
}

char* realpath(const char* path, char* resolved) { return real_path_as(path, resolved); }

// NOLINTNEXTLINE(bugprone-reserved-identifier): the C library's own name
char* __realpath_chk(const char* path, char* resolved, std::size_t /*size*/) {
  return real_path_as(path, resolved);
}

void* mmap(void* at, std::size_t size, int protection, int flags, int file, off_t offset) {
  return map_as("mmap", at, size, protection, flags, file, offset);
}

void* mmap64(void* at, std::size_t size, int protection, int flags, int file, off_t offset) {
  return map_as("mmap64", at, size, protection, flags, file, offset);
}

int close(int file) {
  std::shared_ptr<xdna_driver::DeviceFile> closed;
  if (!machine_root().empty()) {
    const std::lock_guard lock(open_files().mutex);
    if (const auto found = open_files().files.find(file); found != open_files().files.end()) {
      closed = std::move(found->second);
      open_files().files.erase(found);
    }
  }
  closed.reset();  // while the file is open, in which it frees its memory
  return next<int (*)(int)>("close")(file);
}

// NOLINTBEGIN(google-runtime-int): as the C library declares it
int ioctl(int file, unsigned long request, ...) {
  va_list list;
  va_start(list, request);
  void* const argument = va_arg(list, void*);
  va_end(list);
  const auto device = device_file(file);
  if (device == nullptr) {
    return next<int (*)(int, unsigned long, void*)>("ioctl")(file, request, argument);
  }
  const int result = device->handle(static_cast<xdna_driver::Request>(_IOC_NR(request)), argument);
  return result < 0 ? fail_with(-result) : result;
}
// NOLINTEND(google-runtime-int)

}  // extern "C"

// The only function of XRT itself that tests replace: it returns XRT's version.
namespace xrt::version {
unsigned int code() {
  if (const auto code = xdna_driver::setting("version", 0); code != 0) {
    return static_cast<unsigned int>(code);
  }
  // RTLD_NEXT does not find it, since the library was loaded after the process began.
  void* const library = dlopen("libxrt_coreutil.so.2", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<unsigned int (*)()>(dlsym(library, "_ZN3xrt7version4codeEv"))();
}
}  // namespace xrt::version
#pragma GCC visibility pop
