#include "trace.h"

#include "json.h"

#include <ATen/MapAllocator.h>
#include <ATen/ops/_indices.h>
#include <ATen/ops/_values.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <ctime>

namespace hybridpar {
namespace {

const std::string kNone = "\"\"", kOther = "\"other\"";

// Calls `visit` with each storage that takes memory, and the tensor that has it.
template <typename Visit>
void for_storages(const Tensors& tensors, const Visit& visit) {
  for (const auto& tensor : tensors) {
    if (tensor.layout() == c10::kStrided) {
      auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (storage != nullptr && storage->nbytes() != 0 && !tensor.is_meta()) visit(storage, tensor);
    } else if (tensor.layout() == c10::kSparse) {
      for_storages({tensor._indices(), tensor._values()}, visit);
    }
  }
}

c10::weak_intrusive_ptr<c10::StorageImpl> weak(c10::StorageImpl* storage) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
}

// The first byte of its storage that a tensor has, and the one after the last.
std::pair<int64_t, int64_t> extent(const at::Tensor& tensor) {
  const int64_t item = tensor.element_size(), start = tensor.storage_offset() * item;
  if (tensor.numel() == 0) return {start, start};
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  return {start, start + (last + 1) * item};
}

// Whether nobody asks who the owner of the memory is, as those do who share or copy it later, or wait for a GPU's copy.
bool can_be_wrapped(c10::StorageImpl& storage) {
  const auto& data = storage._mutable_data_ptr_no_checks();
  return storage.device_type() == c10::kCPU &&
         (storage.allocator() == nullptr || storage.allocator() == c10::GetCPUAllocator()) &&
         !c10::impl::cow::is_cow_data_ptr(data) && at::MapAllocator::fromDataPtr(data) == nullptr &&
         at::RefcountedMapAllocator::fromDataPtr(data) == nullptr;
}

}  // namespace

// The owner of a storage's memory, around the one it had.
struct Trace::Watched {
  std::shared_ptr<Trace> trace;
  Storage storage;
  c10::DataPtr memory;
};

int64_t Trace::now() const {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec - begun_;
}

void Trace::note(What what, const Block& block, const std::string* op, int64_t time, const std::string* name) {
  events_.push_back({what, layer, block.number, block.num_bytes, time, op, name});
}

// A new number for the block of a storage.
void Trace::malloc(Storage storage, Block& block, const std::string* op, int64_t time, const std::string* name) {
  block.number = next_++;
  block.num_bytes = static_cast<int64_t>(storage->nbytes());
  block.span = span_;
  block.place = events_.size();
  note(What::kMalloc, block, op, time, name);
  watch(storage);
}

Block& Trace::make(Storage storage, const std::string* op, int64_t time, const std::string* name) {
  Block& block = blocks_.emplace(storage, Block{0, 0, weak(storage), 0, 0, 0}).first->second;
  malloc(storage, block, op, time, name);
  return block;
}

// The block of a storage that was resized is another one.
void Trace::update(Storage storage, Block& block, const std::string* op, int64_t time) {
  if (block.num_bytes == static_cast<int64_t>(storage->nbytes())) return;
  note(What::kFree, block, &kNone, time, &kNone);
  malloc(storage, block, op, time, &kNone);
}

// The block of a storage that an operator was given.
Block& Trace::known(Storage storage, const std::string* op, int64_t time) {
  auto found = blocks_.find(storage);
  if (found == blocks_.end()) return make(storage, &kNone, time, &kOther);
  update(storage, found->second, op, time);
  return found->second;
}

// Each tensor once.
std::vector<Accessed> Trace::accessed(const Tensors& tensors, const std::string* op, int64_t time) {
  std::vector<Accessed> found;
  const auto mark = ++mark_;
  for_storages(tensors, [&](Storage storage, const at::Tensor& tensor) {
    Block& block = known(storage, op, time);
    bool is_in_parts = false;
    const auto named = parts_.find(storage);
    if (named != parts_.end()) {
      auto& parts = named->second.parts;
      const auto [start, stop] = extent(tensor);
      auto part = std::upper_bound(parts.begin(), parts.end(), start,
                                   [](int64_t place, const Part& other) { return place < other.stop; });
      for (; part != parts.end() && part->start < stop; ++part) {
        if (part->mark != mark) found.push_back({&block, &*part});
        part->mark = mark;
        is_in_parts = true;
      }
    }
    if (is_in_parts) return;
    if (block.mark != mark) found.push_back({&block, nullptr});
    block.mark = mark;
  });
  return found;
}

void Trace::note(What what, const Accessed& accessed, const std::string* op, int64_t time) {
  const auto [block, part] = accessed;
  const auto num_bytes = part == nullptr ? block->num_bytes : part->stop - part->start;
  events_.push_back({what, layer, block->number, num_bytes, time, op, part == nullptr ? &kNone : part->name});
}

void Trace::access(const Access& access) {
  const std::lock_guard lock(mutex_);
  look_again();
  const auto time = now();
  const auto reads = accessed(access.reads, access.op, time);
  auto writes = accessed(access.writes, access.op, time);
  std::vector<Storage> fresh;
  for_storages(access.made, [&](Storage storage, const at::Tensor&) {
    auto found = blocks_.find(storage);
    if (found != blocks_.end()) return update(storage, found->second, access.op, time);
    for (auto* other : fresh) {
      if (other == storage) return;
    }
    fresh.push_back(storage);
  });
  if (fresh.empty() && writes.empty() && !access.made.empty()) return;  // a view
  for (auto* storage : fresh) {
    Block& block = make(storage, access.op, time, &kNone);
    if (!access.fresh) writes.push_back({&block, nullptr});
  }
  if (access.scratch != 0) {
    for (const auto what : {What::kMalloc, What::kWrite, What::kRead, What::kFree}) {
      events_.push_back({what, layer, next_, access.scratch, time, access.op, &kNone});
    }
    ++next_;
  }
  for (const auto& one : reads) note(What::kRead, one, access.op, time);
  for (const auto& one : writes) note(What::kWrite, one, access.op, time);
}

void Trace::move(const at::Tensor& old, const at::Tensor& made) {
  const std::lock_guard lock(mutex_);
  look_again();
  Storage from = nullptr, to = nullptr;
  for_storages({old}, [&](Storage storage, const at::Tensor&) { from = storage; });
  for_storages({made}, [&](Storage storage, const at::Tensor&) { to = storage; });
  if (from == nullptr || to == nullptr) return;
  Block block = known(from, &kNone, now());
  if (from == to) return;
  blocks_.erase(from);
  block.storage = weak(to);
  blocks_.emplace(to, std::move(block));
  watch(to);
}

void Trace::adopt(const std::string& name, const Tensors& tensors) {
  const std::lock_guard lock(mutex_);
  look_again();
  const auto time = now();
  const auto* kept = &*names_.insert(name).first;
  for_storages(tensors, [&](Storage storage, const at::Tensor&) {
    auto found = blocks_.find(storage);
    if (found == blocks_.end()) {
      make(storage, &kNone, time, kept);
    } else if (found->second.span == span_) {
      events_[found->second.place].name = kept;
    }
  });
}

void Trace::resized(const std::string& name, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto time = now();
  auto found = blocks_.find(storage);
  if (found != blocks_.end()) {
    note(What::kFree, found->second, &kNone, time, &kNone);
    blocks_.erase(found);
  }
  look_again();
  if (storage->nbytes() != 0) make(storage, &kNone, time, &*names_.insert(name).first);
}

void Trace::name_tensors(const std::vector<std::string>& names, const Tensors& tensors) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [start, stop] = extent(tensors[i]);
    if (start == stop) continue;
    auto* storage = tensors[i].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    auto& parts = parts_.try_emplace(storage, Parts{weak(storage), {}}).first->second.parts;
    const auto place = std::upper_bound(parts.begin(), parts.end(), start,
                                        [](int64_t at, const Part& other) { return at < other.stop; });
    parts.insert(place, {start, stop, &*names_.insert(names[i]).first, 0});
  }
}

std::pair<size_t, std::string> Trace::take() {
  std::vector<Event> events;
  {
    const std::lock_guard lock(mutex_);
    events.swap(events_);
    events_.reserve(events.size());
    ++span_;
  }
  std::string text;
  text.reserve(96 * events.size() + 2);
  text += '[';
  for (const auto& event : events) append_event(text, event);
  text += ']';
  return {events.size(), std::move(text)};
}

void Trace::close() {
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  blocks_.clear();
  parts_.clear();
  unwatched_.clear();
}

// Has `ended` called when the storage's memory is given back, by wrapping its owner; where that cannot be, it is asked.
void Trace::watch(Storage storage) {
  auto& data = storage->_mutable_data_ptr_no_checks();
  if (!can_be_wrapped(*storage)) {
    unwatched_.push_back(storage);
    return;
  }
  if (data.get_deleter() == &gone && static_cast<Watched*>(data.get_context())->trace.get() == this) return;
  void* address = data.get();
  const auto device = data.device();
  auto* watched = new Watched{shared_from_this(), storage, std::move(data)};
  storage->set_data_ptr_noswap(c10::DataPtr(address, watched, &gone, device));
}

void Trace::gone(void* context) {
  const std::unique_ptr<Watched> watched(static_cast<Watched*>(context));
  watched->trace->ended(watched->storage);
}

void Trace::ended(Storage storage) {
  const std::lock_guard lock(mutex_);
  auto found = blocks_.find(storage);
  if (!is_open_ || found == blocks_.end()) return;
  if (!found->second.storage.expired()) {  // it has other memory now
    unwatched_.push_back(storage);
    return;
  }
  note(What::kFree, found->second, &kNone, now(), &kNone);
  blocks_.erase(found);
}

// Finds out about the storages that do not say when they end.
void Trace::look_again() {
  if (unwatched_.empty()) return;
  std::vector<Storage> unwatched;
  unwatched.swap(unwatched_);
  for (auto* storage : unwatched) {
    auto found = blocks_.find(storage);
    if (found == blocks_.end()) continue;
    if (const auto alive = found->second.storage.lock()) {
      watch(storage);
    } else {
      note(What::kFree, found->second, &kNone, now(), &kNone);
      blocks_.erase(found);
    }
  }
}

}  // namespace hybridpar
