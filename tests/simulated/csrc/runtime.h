// Streams, events and what the host may know of them.
//
// Operations run at once, but the host is told nothing before it waits, as on a device that runs behind:
//   * what a non-blocking copy brings to pinned memory arrives when the host waits for it, and is 0xFF until then;
//   * what a non-blocking copy takes from pinned memory must be there unchanged until the host has waited;
//   * memory that one stream writes and another uses needs an event between the two.
// Vector clocks (Fidge 1988, Mattern 1989) say what the host, and each stream, has waited for.
#pragma once

#include <functional>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

inline void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, count] : other) into[stream] = std::max(into[stream], count);
}

inline bool covers(const Clock& clock, const StreamKey& stream, uint64_t count) {
  auto found = clock.find(stream);
  return count == 0 || (found != clock.end() && found->second >= count);
}

struct Event {
  Clock clock;
  bool asked = false;
};

struct Pending {
  StreamKey stream;
  uint64_t count;
  std::function<void()> finish;  // raises where the host broke a rule
};

struct Runtime {
  std::map<StreamKey, Clock> streams;
  Clock host;
  std::vector<Pending> pending;
  std::map<std::string, int64_t> waits;  // kind -> how often the host has waited
  int64_t num_operations = 0;
  int64_t last_stream = 0;

  Clock& clock(const StreamKey& stream) { return streams[stream]; }

  // Counts one more operation of `stream` and returns its number there.
  uint64_t launch(const StreamKey& stream) {
    ++num_operations;
    return ++clock(stream)[stream];
  }

  // Notes that operation `count` of `stream` uses `block`; raises where no event orders it behind another stream's use.
  void use(Block& block, const StreamKey& stream, uint64_t count, bool writes) {
    const auto before = [&](const StreamKey& other, uint64_t last) {
      return other == stream || covers(clock(stream), other, last) || covers(host, other, last);
    };
    bool ordered = before(block.writer, block.written);
    for (const auto& [reader, last] : block.readers) ordered = ordered && (!writes || before(reader, last));
    TORCH_CHECK(
        ordered, "race on sim:", block.device, ": stream ", stream.second, writes ? " writes" : " reads",
        " memory that another stream uses, and no event orders the two");
    if (writes) {
      block.writer = stream;
      block.written = count;
      block.readers.clear();
    } else {
      block.readers[stream] = count;
    }
  }

  // The host waits for all that `upto` counts.
  void wait(const std::string& kind, const Clock& upto);

  // All that `upto` counts is done, and the host knows.
  void complete(const Clock& upto);
};

inline Runtime& runtime() {
  static auto* only = new Runtime;
  return *only;
}

inline thread_local int64_t current_stream[kDevices] = {};
inline thread_local bool waits_forbidden = false;
inline thread_local bool recording_now = false;

inline StreamKey stream_of(int device) {
  return {device, current_stream[device]};
}

inline StreamKey key(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

inline void Runtime::wait(const std::string& kind, const Clock& upto) {
  Guard guard(lock());
  TORCH_CHECK(!recording_now, "the host waits for the device (", kind, ") while a graph is being recorded");
  TORCH_CHECK(!waits_forbidden, "the host waits for the device (", kind, ") where that is forbidden");
  ++waits[kind];
  complete(upto);
}

inline void Runtime::complete(const Clock& upto) {
  merge(host, upto);
  std::vector<Pending> all;
  all.swap(pending);
  std::exception_ptr error;
  for (auto& transfer : all) {
    if (!covers(host, transfer.stream, transfer.count)) {
      pending.push_back(std::move(transfer));
      continue;
    }
    try {
      transfer.finish();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

inline void synchronize_device(int device) {
  Guard guard(lock());
  Clock all;
  for (auto& [stream, clock] : runtime().streams) {
    if (stream.first == device) merge(all, clock);
  }
  runtime().wait("synchronize", all);
}

// Pinned memory is ordinary memory whose addresses are remembered.
struct PinnedAllocator final : c10::Allocator {
  std::map<char*, size_t> ranges;

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, bytes) == 0, "cannot allocate ", bytes, " bytes of pinned memory");
    Guard guard(lock());
    ranges[static_cast<char*>(start)] = bytes;
    return {start, start, &release, c10::Device(c10::DeviceType::CPU)};
  }

  bool holds(const void* address) const {
    Guard guard(lock());
    const char* at = static_cast<const char*>(address);
    auto after = ranges.upper_bound(const_cast<char*>(at));
    if (after == ranges.begin()) return false;
    const auto& [start, bytes] = *std::prev(after);
    return at < start + bytes;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* start);
};

inline PinnedAllocator& pinned() {
  static auto* only = new PinnedAllocator;
  return *only;
}

inline void PinnedAllocator::release(void* start) {
  Guard guard(lock());
  pinned().ranges.erase(static_cast<char*>(start));
  free(start);
}

inline int set_device(int device) {
  TORCH_CHECK(0 <= device && device < kDevices, "there are ", kDevices, " simulated devices, and no sim:", device);
  return std::exchange(current_device, device);
}

// Makes a device current for a block of code.
struct OnDevice {
  const int before;
  explicit OnDevice(int device) : before(set_device(device)) {}
  ~OnDevice() { current_device = before; }
};

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device at(int device) {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)};
  }
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return at(set_device(device.index())); }
  c10::Device getDevice() const override { return at(current_device); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Guard guard(lock());
    return stream(device, ++runtime().last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device(), std::exchange(current_stream[next.device_index()], next.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Guard guard(lock());
    return is_known(runtime().clock(key(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Guard guard(lock());
    runtime().wait("stream", Clock(runtime().clock(key(stream))));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }
  bool isStreamCapturing(const c10::Stream&) const override { return recording_now; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Guard guard(lock());
    if (*event == nullptr) *event = new Event;
    *static_cast<Event*>(*event) = {runtime().clock(key(stream)), false};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Guard guard(lock());
    if (event != nullptr) merge(runtime().clock(key(stream)), static_cast<Event*>(event)->clock);
  }
  // The first question about work that nobody waited for is answered with no, so that both answers are seen.
  bool queryEvent(void* event) const override {
    Guard guard(lock());
    auto* recorded = static_cast<Event*>(event);
    if (recorded == nullptr || is_known(recorded->clock)) return true;
    if (!std::exchange(recorded->asked, true)) return false;
    runtime().complete(recorded->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) runtime().wait("event", static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  static bool is_known(const Clock& clock) {
    return std::all_of(clock.begin(), clock.end(), [](const auto& entry) {
      return covers(runtime().host, entry.first, entry.second);
    });
  }
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, at(index(device)), id);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return pinned().holds(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const OnDevice here(storage.device().index());
    c10::DataPtr moved = allocator().allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) allocator().copy_data(moved.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(moved));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace sim
