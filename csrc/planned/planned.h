// A planned arena: requests that come in the order that was foreseen get the places that were planned for them.
//
// What is not as foreseen gets nothing here, and so its memory from another allocator: nothing is ever wrong, only less
// planned. Neither torch nor CUDA; cpu.cpp and cuda.cpp put it before the allocator of a device.
//
//   span       the requests of one action of a rank's step; with each, the plan is entered at a known place
//   departed   a request of another size than foreseen, or beyond the last; so is the rest of its span
//   occupied   the place is still taken, by something that lives longer than it did when the plan was made
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#define HYBRIDPAR_EXPORT extern "C" __attribute__((visibility("default")))

namespace hybridpar {

// Memory of an arena; null: there is none. Each front has its own.
void* map_arena(size_t bytes);
void unmap_arena(void* base, size_t bytes);

class Planned {
 public:
  struct Entry {
    int64_t bytes, offset;  // offset < 0: it has no place
  };
  enum What : int64_t { kTurn, kMalloc, kFree };
  struct Event {
    int64_t what, value;  // number of a span; bytes; number of a block, in the order of mallocs
  };
  struct Counts {
    int64_t hits = 0, departed = 0, occupied = 0, unplanned = 0, living = 0, most_living = 0, top = 0, bytes = 0;
  };

  // Requests are of this span from now on; negative: of none.
  void turn_to(int64_t span);
  // A place; null where there is none.
  void* take(size_t bytes);
  // Another allocator has served a request of a span. Whether its end is to be told by `give_back`.
  bool note(void* block, size_t bytes);
  // Whether the block was of an arena. To be called before the memory can be used again.
  bool give_back(void* block);

  void record(bool on);
  std::vector<Event> take_events();
  // The entries of span i are those from firsts[i] on. False: there is no memory.
  bool plan(std::vector<Entry> entries, std::vector<int64_t> firsts, int64_t bytes);
  Counts counts();

 private:
  struct Arena {
    char* base;
    size_t bytes;
    std::map<size_t, size_t> living;  // ends by offsets
  };

  bool is_planned() const { return !firsts_.empty(); }
  void drop();

  std::mutex mutex_;
  std::vector<Arena> arenas_;  // the last one is that of the plan, if there is one; others have blocks
  std::vector<Entry> entries_;
  std::vector<int64_t> firsts_;
  size_t next_ = 0, stop_ = 0;
  bool in_span_ = false, is_recording_ = false;
  Counts counts_;
  std::vector<Event> events_;
  std::unordered_map<void*, int64_t> recorded_;
  int64_t num_recorded_ = 0;
};

// The process has one allocator of a device, and so one of these.
Planned& planned();

}  // namespace hybridpar
