// The planned arena before torch's allocator of CPUs: for the thread that turns to spans, on huge pages.
#include "planned.h"

#include <c10/core/CPUAllocator.h>

#include <sys/mman.h>

namespace hybridpar {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

thread_local bool is_planned = false;

class PlannedAllocator final : public c10::Allocator {
 public:
  explicit PlannedAllocator(c10::Allocator* other) : other(other) {}

  c10::Allocator* const other;

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0 || !is_planned) return other->allocate(bytes);
    if (void* place = planned().take(bytes)) {
      c10::profiledCPUMemoryReporter().New(place, bytes);
      return {place, place, &give_back, c10::kCPU};
    }
    auto block = other->allocate(bytes);
    if (!planned().note(block.get(), bytes)) return block;
    void* address = block.release_context();
    return {address, address, &give_back, c10::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void give_back(void* block);
};

PlannedAllocator* allocator() {
  static auto* one = new PlannedAllocator(c10::GetCPUAllocator());
  return one;
}

void PlannedAllocator::give_back(void* block) {
  if (block == nullptr) return;
  if (planned().give_back(block)) {
    c10::profiledCPUMemoryReporter().Delete(block);
  } else {
    allocator()->other->raw_deallocate(block);
  }
}

}  // namespace

void* map_arena(size_t bytes) {
  bytes = (bytes + kHuge - 1) / kHuge * kHuge;
  auto* whole = static_cast<char*>(
      mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (whole == MAP_FAILED) return nullptr;
  const size_t before = (kHuge - reinterpret_cast<uintptr_t>(whole) % kHuge) % kHuge;
  if (before != 0) munmap(whole, before);
  munmap(whole + before + bytes, kHuge - before);
  madvise(whole + before, bytes, MADV_HUGEPAGE);  // to be refused changes nothing
  return whole + before;
}

void unmap_arena(void* base, size_t bytes) { munmap(base, (bytes + kHuge - 1) / kHuge * kHuge); }

}  // namespace hybridpar

// Whether requests of this thread are of a span is told by it alone: other threads' come as they like.
HYBRIDPAR_EXPORT void hybridpar_planned_turn_to(int64_t span) {
  hybridpar::is_planned = span >= 0;
  hybridpar::planned().turn_to(span);
}

// Puts the arena before the allocator that is there, or that one back. Returns 0 where another one is there since.
HYBRIDPAR_EXPORT int hybridpar_planned_install(int on) {
  auto* ours = hybridpar::allocator();
  auto* from = on ? ours->other : static_cast<c10::Allocator*>(ours);
  if (c10::GetCPUAllocator() != from) return on && c10::GetCPUAllocator() == ours;
  c10::SetCPUAllocator(on ? static_cast<c10::Allocator*>(ours) : ours->other);
  return 1;
}
