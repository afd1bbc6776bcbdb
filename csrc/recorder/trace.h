// The memory events of one recording, and the blocks that it watches: the counterpart of memory_behaviour/recording/mode_observer.py.
#pragma once

#include <c10/core/StorageImpl.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace hybridpar {

using Tensors = std::vector<at::Tensor>;

enum class What : uint8_t { kMalloc, kFree, kRead, kWrite };

struct Event {
  What what;
  int layer;
  int64_t block, num_bytes, time;  // nanoseconds since the recording began
  const std::string *op, *name;    // JSON
};

// The memory of one storage. The weak reference keeps the storage's address from being used again.
struct Block {
  int64_t number, num_bytes;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t span;   // the one in which it was made
  size_t place;   // of its malloc among the events of that span
  uint64_t mark;  // the list of blocks in which it was seen last
};

// A named tensor in a block: bytes [start, stop). `mark`: as in Block.
struct Part {
  int64_t start, stop;
  const std::string* name;  // JSON
  uint64_t mark;
};

// The named tensors of a storage, in the order of their places.
struct Parts {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::vector<Part> parts;
};

// A tensor that an operator accesses: a part of a block, or all of it.
struct Accessed {
  const Block* block;
  const Part* part;
};

// What an operator did. `scratch`: bytes that it took for itself. `fresh`: it writes nothing to what it makes.
struct Access {
  const std::string* op;
  Tensors reads, writes, made;
  int64_t scratch;
  bool fresh;
};

// Used by whatever threads give memory back; no method calls Python.
class Trace : public std::enable_shared_from_this<Trace> {
 public:
  explicit Trace(int64_t begun) : begun_(begun) {}

  int layer = -1;

  void access(const Access& access);
  // A sum that added nothing: `made` is `old` from now on.
  void move(const at::Tensor& old, const at::Tensor& made);
  void adopt(const std::string& name, const Tensors& tensors);
  // The storage of `tensor` was emptied, or has memory again.
  void resized(const std::string& name, const at::Tensor& tensor);
  // Contiguous tensors that divide blocks, with their names.
  void name_tensors(const std::vector<std::string>& names, const Tensors& tensors);
  // The number of events since the last call, and these as a JSON list.
  std::pair<size_t, std::string> take();
  // Blocks are not watched any more.
  void close();

 private:
  using Storage = c10::StorageImpl*;
  struct Watched;

  int64_t now() const;
  void note(What what, const Block& block, const std::string* op, int64_t time, const std::string* name);
  void malloc(Storage storage, Block& block, const std::string* op, int64_t time, const std::string* name);
  Block& make(Storage storage, const std::string* op, int64_t time, const std::string* name);
  Block& known(Storage storage, const std::string* op, int64_t time);
  void update(Storage storage, Block& block, const std::string* op, int64_t time);
  std::vector<Accessed> accessed(const Tensors& tensors, const std::string* op, int64_t time);
  void note(What what, const Accessed& accessed, const std::string* op, int64_t time);
  void watch(Storage storage);
  void look_again();
  void ended(Storage storage);
  static void gone(void* watched);

  std::recursive_mutex mutex_;
  const int64_t begun_;
  bool is_open_ = true;
  int64_t next_ = 0, span_ = 0;
  uint64_t mark_ = 0;
  std::vector<Event> events_;
  std::unordered_map<Storage, Block> blocks_;
  std::unordered_map<Storage, Parts> parts_;
  std::vector<Storage> unwatched_;          // blocks whose end is asked for at every operator
  std::unordered_set<std::string> names_;   // to which events point
};

}  // namespace hybridpar
