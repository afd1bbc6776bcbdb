#include "planned.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hybridpar {

Planned& planned() {
  static auto* one = new Planned;  // blocks may end after all else
  return *one;
}

void Planned::turn_to(int64_t span) {
  const std::lock_guard lock(mutex_);
  in_span_ = span >= 0;
  if (is_recording_ && in_span_) events_.push_back({kTurn, span});
  const bool is_planned = in_span_ && span + 1 < static_cast<int64_t>(firsts_.size());
  next_ = is_planned ? firsts_[span] : 0;
  stop_ = is_planned ? firsts_[span + 1] : 0;
}

void* Planned::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!in_span_ || is_recording_ || !is_planned()) return nullptr;
  if (next_ >= stop_ || entries_[next_].bytes != static_cast<int64_t>(bytes)) {
    ++counts_.departed;
    next_ = stop_;
    return nullptr;
  }
  const auto offset = entries_[next_++].offset;
  if (offset < 0) {
    ++counts_.unplanned;
    return nullptr;
  }
  auto& [base, size, living] = arenas_.back();
  const size_t begin = offset, end = begin + bytes;
  const auto after = living.lower_bound(begin);
  if ((after != living.end() && after->first < end) || (after != living.begin() && std::prev(after)->second > begin)) {
    ++counts_.occupied;
    return nullptr;
  }
  living.emplace_hint(after, begin, end);
  ++counts_.hits;
  counts_.living += bytes;
  counts_.most_living = std::max(counts_.most_living, counts_.living);
  counts_.top = std::max<int64_t>(counts_.top, end);
  return base + begin;
}

bool Planned::note(void* block, size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!in_span_ || !is_recording_) return false;
  recorded_[block] = num_recorded_++;
  events_.push_back({kMalloc, static_cast<int64_t>(bytes)});
  return true;
}

bool Planned::give_back(void* block) {
  const std::lock_guard lock(mutex_);
  for (auto arena = arenas_.rbegin(); arena != arenas_.rend(); ++arena) {
    auto* const at = static_cast<char*>(block);
    if (at < arena->base || at >= arena->base + arena->bytes) continue;
    const auto found = arena->living.find(at - arena->base);
    const bool is_current = is_planned() && arena == arenas_.rbegin();
    if (is_current) counts_.living -= found->second - found->first;
    arena->living.erase(found);
    if (!is_current) drop();
    return true;
  }
  if (!recorded_.empty()) {
    if (const auto found = recorded_.find(block); found != recorded_.end()) {
      if (is_recording_) events_.push_back({kFree, found->second});
      recorded_.erase(found);
    }
  }
  return false;
}

void Planned::record(bool on) {
  const std::lock_guard lock(mutex_);
  is_recording_ = on;
  events_.clear();
  recorded_.clear();
  num_recorded_ = 0;
}

std::vector<Planned::Event> Planned::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

bool Planned::plan(std::vector<Entry> entries, std::vector<int64_t> firsts, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  entries_.clear();
  firsts_.clear();
  next_ = stop_ = 0;
  counts_ = {};
  drop();
  if (bytes == 0) return true;
  void* base = map_arena(bytes);
  if (base == nullptr) return false;
  arenas_.push_back({static_cast<char*>(base), static_cast<size_t>(bytes), {}});
  entries_ = std::move(entries);
  firsts_ = std::move(firsts);
  counts_.bytes = bytes;
  return true;
}

Planned::Counts Planned::counts() {
  const std::lock_guard lock(mutex_);
  return counts_;
}

// Gives back arenas without a block, but that of the plan.
void Planned::drop() {
  const auto last = arenas_.end() - is_planned();
  const auto is_empty = [](const Arena& arena) { return arena.living.empty(); };
  for (auto arena = arenas_.begin(); arena != last; ++arena) {
    if (is_empty(*arena)) unmap_arena(arena->base, arena->bytes);
  }
  arenas_.erase(std::remove_if(arenas_.begin(), last, is_empty), last);
}

}  // namespace hybridpar

// What memory/planned.py calls.

using hybridpar::planned;
using hybridpar::Planned;

HYBRIDPAR_EXPORT void hybridpar_planned_record(int on) { planned().record(on != 0); }

// Hands over at most `room` pairs of numbers and forgets all events; returns how many there were. Room 0: only tells.
HYBRIDPAR_EXPORT int64_t hybridpar_planned_events(int64_t* pairs, int64_t room) {
  static thread_local std::vector<Planned::Event> events;
  if (room == 0) events = planned().take_events();
  const auto count = static_cast<int64_t>(events.size());
  for (int64_t i = 0; i < std::min(room, count); ++i) {
    pairs[2 * i] = events[i].what;
    pairs[2 * i + 1] = events[i].value;
  }
  if (room != 0) events = {};
  return count;
}

// `sizes` and `offsets` of `count` entries; `firsts` of `spans` spans, and the end of the last. 0 bytes: no plan any more.
// Returns 0 where there is no memory.
HYBRIDPAR_EXPORT int hybridpar_planned_plan(const int64_t* sizes, const int64_t* offsets, int64_t count,
                                            const int64_t* firsts, int64_t spans, int64_t bytes) {
  std::vector<Planned::Entry> entries(count);
  for (int64_t i = 0; i < count; ++i) entries[i] = {sizes[i], offsets[i]};
  return planned().plan(std::move(entries), std::vector<int64_t>(firsts, firsts + (spans ? spans + 1 : 0)), bytes);
}

HYBRIDPAR_EXPORT void hybridpar_planned_counts(int64_t* counts) {
  const auto found = planned().counts();
  const int64_t all[] = {found.hits,   found.departed,    found.occupied, found.unplanned,
                         found.living, found.most_living, found.top,      found.bytes};
  std::copy(std::begin(all), std::end(all), counts);
}
