// The memory of the simulated devices: host memory underneath, at addresses of its own.
//
// Each device has two equal ranges of addresses. Tensors point into the first, which nobody may touch: a host that
// reads device memory by mistake ends with a segmentation fault at the guilty instruction. "Kernels" reach the same
// bytes at a fixed distance, in the second range. Memory is 0xFF wherever nothing was written yet or no longer stands
// (NaN as a float, -1 as an integer): what is read too early, or too late, shows.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

namespace sim {

constexpr int kDevices = 2;
constexpr size_t kSpan = size_t(8) << 30;
constexpr size_t kAlignment = 512;
constexpr size_t kDefaultLimit = size_t(2) << 30;
constexpr int kPoison = 0xFF;

using StreamKey = std::pair<int, int64_t>;  // device, stream id
using Clock = std::map<StreamKey, uint64_t>;  // of each stream: how many of its operations came before

struct Block {
  int device;
  size_t offset, size;
  std::string tag;
  uint64_t number = next_number();  // in the order of allocation
  bool suspended = false;
  // Who used it last, to find uses that no event orders; see runtime.h.
  StreamKey writer{-1, 0};
  uint64_t written = 0;
  Clock readers;

  static uint64_t next_number() {
    static uint64_t last = 0;
    return ++last;
  }
};

// Everything below is guarded by this one lock.
inline std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

// Holds `lock()`. Gives up Python's interpreter lock while it waits: the thread that holds `lock()` may need the
// interpreter to free a tensor.
class Guard {
 public:
  explicit Guard(std::recursive_mutex& mutex) : held_(mutex, std::try_to_lock) {
    if (held_) return;
    PyThreadState* interpreter = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    held_.lock();
    if (interpreter != nullptr) PyEval_RestoreThread(interpreter);
  }

 private:
  std::unique_lock<std::recursive_mutex> held_;
};

inline thread_local std::string current_tag = "other";
inline thread_local int current_device = 0;

class Arena {
 public:
  size_t limit = kDefaultLimit, used = 0, peak = 0;
  int64_t num_allocations = 0;
  std::map<std::string, size_t> by_tag;

  explicit Arena(int device) : device_(device) {
    base_ = map(PROT_NONE);
    shadow_ = map(PROT_READ | PROT_WRITE);
    free_[0] = kSpan;
  }

  char* base() const { return base_; }
  bool holds(const void* device_address) const { return within(device_address, base_); }
  bool shadows(const void* host_address) const { return within(host_address, shadow_); }
  char* host(const void* device_address) const { return shadow_ + (static_cast<const char*>(device_address) - base_); }

  Block* allocate(size_t wanted) {
    const size_t size = (wanted + kAlignment - 1) / kAlignment * kAlignment;
    auto hole = std::find_if(free_.begin(), free_.end(), [&](const auto& h) { return h.second >= size; });
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        used + size <= limit && hole != free_.end(),
        "sim:", device_, " is out of memory: ", wanted, " bytes were asked for, ", limit - std::min(used, limit), " of ",
        limit, " are free");
    const size_t offset = hole->first, rest = hole->second - size;
    free_.erase(hole);
    if (rest) free_[offset + size] = rest;
    auto* block = new Block{device_, offset, size, current_tag};
    blocks_.insert(block);
    count(block);
    ++num_allocations;
    std::memset(shadow_ + offset, kPoison, size);
    return block;
  }

  void release(Block* block) {
    std::memset(shadow_ + block->offset, kPoison, block->size);
    if (!block->suspended) uncount(block);
    auto hole = free_.emplace(block->offset, block->size).first;
    if (auto next = std::next(hole); next != free_.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      free_.erase(next);
    }
    if (hole != free_.begin()) {
      if (auto before = std::prev(hole); before->first + before->second == hole->first) {
        before->second += hole->second;
        free_.erase(hole);
      }
    }
    blocks_.erase(block);
    delete block;
  }

  void suspend(const std::string& tag) {
    for (Block* block : blocks_) {
      if (block->tag != tag || block->suspended) continue;
      block->suspended = true;
      uncount(block);
      madvise(shadow_ + block->offset, block->size, MADV_DONTNEED);
    }
  }

  void resume(const std::string& tag) {
    for (Block* block : blocks_) {
      if (block->tag != tag || !block->suspended) continue;
      TORCH_CHECK_WITH(
          OutOfMemoryError, used + block->size <= limit, "sim:", device_, " has no room to resume ", tag);
      block->suspended = false;
      count(block);
      std::memset(shadow_ + block->offset, kPoison, block->size);
    }
  }

 private:
  static char* map(int protection) {
    void* start = mmap(nullptr, kSpan, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "cannot reserve addresses for the simulated device: ", std::strerror(errno));
    return static_cast<char*>(start);
  }

  static bool within(const void* address, const char* start) {
    const char* at = static_cast<const char*>(address);
    return at >= start && at < start + kSpan;
  }

  void count(const Block* block) {
    used += block->size;
    peak = std::max(peak, used);
    by_tag[block->tag] += block->size;
  }

  void uncount(const Block* block) {
    used -= block->size;
    by_tag[block->tag] -= block->size;
  }

  int device_;
  char *base_, *shadow_;
  std::map<size_t, size_t> free_;  // offset -> size
  std::set<Block*> blocks_;
};

// Created with the first use; never destroyed, since tensors may outlive everything else.
inline Arena& arena(int device) {
  static auto* arenas = [] {
    auto* all = new std::vector<Arena>;
    for (int i = 0; i < kDevices; ++i) all->emplace_back(i);
    return all;
  }();
  return arenas->at(device);
}

inline bool is_shadow(const void* host_address) {
  for (int i = 0; i < kDevices; ++i) {
    if (arena(i).shadows(host_address)) return true;
  }
  return false;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    Guard guard(lock());
    const c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(current_device));
    if (bytes == 0) return {nullptr, device};
    Block* block = arena(current_device).allocate(bytes);
    return {arena(current_device).base() + block->offset, block, &release, device};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(host(to), host(from), bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Guard guard(lock());
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*array)[0];
      all.current = static_cast<int64_t>(arena(device).used);
      all.peak = static_cast<int64_t>(arena(device).peak);
    }
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex device) override {
    Guard guard(lock());
    arena(device).peak = arena(device).used;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Guard guard(lock());
    const Arena& memory = arena(device);
    return {memory.limit - std::min(memory.used, memory.limit), memory.limit};
  }

 private:
  static void release(void* context) {
    Guard guard(lock());
    auto* block = static_cast<Block*>(context);
    arena(block->device).release(block);
  }

  static char* host(const void* address) {
    for (int i = 0; i < kDevices; ++i) {
      if (arena(i).holds(address)) return arena(i).host(address);
    }
    TORCH_CHECK(false, "no simulated device has the address ", address);
  }
};

inline Allocator& allocator() {
  static auto* only = new Allocator;
  return *only;
}

}  // namespace sim
