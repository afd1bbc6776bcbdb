// The dynamic program over pairs of ideals of hybridpar.placement.solvers.exact, which says what it computes.
//
// For each ideal I, its subsets I' are walked depth first: classes leave I in falling order of their numbers, so each I' is met
// once. S = I - I' grows by one class a step; what S costs is updated with it: times and bytes are passed down the walk,
// and for each net there is a count of its classes in S. A net is transferred while S holds some but not all of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

namespace hybridpar {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kStepsBetweenClocks = 1 << 16;

template <class T>
const T* read(const char* name, const Tensor& x, ScalarType type, int64_t numel) {
  STD_TORCH_CHECK(x.is_contiguous() && x.scalar_type() == type && x.numel() == numel, "placement_best_loads: ", name,
                  " must be contiguous, of another type or size");
  return static_cast<const T*>(x.const_data_ptr());
}

// Ranges of equal first columns of a sorted table [rows, columns], whose other columns are below `bound`.
std::vector<int64_t> ranges(const char* name, const int64_t* table, int64_t rows, int columns, int64_t num,
                            const int64_t* bound) {
  std::vector<int64_t> start(num + 1, 0);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t* row = table + i * columns;
    STD_TORCH_CHECK(row[0] >= 0 && row[0] < num && (i == 0 || row[-columns] <= row[0]), "placement_best_loads: ", name,
                    " must be sorted by its first column, whose values are in range");
    for (int j = 1; j < columns; ++j)
      STD_TORCH_CHECK(row[j] >= 0 && row[j] < bound[j], "placement_best_loads: ", name, " points out of range");
    ++start[row[0] + 1];
  }
  for (int64_t i = 0; i < num; ++i) start[i + 1] += start[i];
  return start;
}

// What S has so far. Times, bytes: sums over its classes.
struct Difference {
  double accelerator, cpu, bytes, transfer;
  bool on_accelerator;  // may still be put on one
};

struct Step {
  int64_t ideal, next, removed;  // I', its next cover to try, and the class whose removal led to it
  Difference difference;
};

class Walk {
 public:
  int64_t num_ideals, num_classes, num_nets;
  const int64_t *covers, *class_nets;  // [.., 3]: ideal, class, ideal without it;  [.., 2]: class, net
  std::vector<int64_t> covers_start, nets_start;
  const double* cost;  // [classes, 4]: accelerator's time, CPU's time, bytes, not 0 if an accelerator cannot run it
  const double* net_cost;
  const int64_t* net_size;
  int64_t num_accelerators, num_cpus;
  double memory, limit;
  std::chrono::steady_clock::time_point deadline;

  // false: out of time. `out`: [ideals, accelerators + 1, cpus + 1]
  bool run(double* out) {
    // each row of `best_` starts with an infinite number, which "one CPU less than none" reads
    width_ = num_cpus + 2;
    row_size_ = (num_accelerators + 1) * width_;
    best_.assign(num_ideals * row_size_, kInfinity);
    held_.assign(num_nets, 0);
    for (int64_t i = 0; i < row_size_; ++i)
      if (i % width_) best_[i] = 0.0;
    for (int64_t ideal = 1; ideal < num_ideals; ++ideal) {
      if (!walk(ideal)) return false;
      accumulate(&best_[ideal * row_size_]);
    }
    for (int64_t i = 0; i < num_ideals * (num_accelerators + 1); ++i)
      std::copy_n(&best_[i * width_ + 1], num_cpus + 1, out + i * (num_cpus + 1));
    return true;
  }

 private:
  int64_t width_ = 0, row_size_ = 0, steps_ = 0;
  std::vector<double> best_;
  std::vector<int64_t> held_;  // classes of each net that are in S
  std::vector<Step> stack_;

  bool walk(int64_t ideal) {
    double* row = &best_[ideal * row_size_];
    stack_.clear();
    stack_.push_back({ideal, covers_start[ideal], num_classes, {0, 0, 0, 0, true}});
    while (!stack_.empty()) {
      Step& top = stack_.back();
      // covers are sorted by falling class: skip those that may not leave any more
      while (top.next < covers_start[top.ideal + 1] && covers[3 * top.next + 1] >= top.removed) ++top.next;
      if (top.next == covers_start[top.ideal + 1]) {
        if (stack_.size() > 1) release(top.removed);
        stack_.pop_back();
        continue;
      }
      const int64_t* cover = covers + 3 * top.next++;
      Difference grown = top.difference;
      if (!grow(cover[1], grown)) continue;
      grown.transfer = hold(cover[1], grown.transfer);
      take(row, &best_[cover[2] * row_size_], grown);
      stack_.push_back({cover[2], covers_start[cover[2]], cover[1], grown});  // invalidates `top`
      if (++steps_ % kStepsBetweenClocks == 0 && std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }

  // false: neither an accelerator nor a CPU may hold that much
  bool grow(int64_t v, Difference& s) const {
    const double* c = cost + 4 * v;
    s.cpu += c[1];
    s.bytes += c[2];
    if (c[3] != 0.0) s.on_accelerator = false; else s.accelerator += c[0];
    s.on_accelerator = s.on_accelerator && s.bytes <= memory && s.accelerator <= limit;
    return s.on_accelerator || (num_cpus > 0 && s.cpu <= limit);
  }

  double hold(int64_t v, double transfer) {
    for (int64_t i = nets_start[v]; i < nets_start[v + 1]; ++i) {
      const int64_t net = class_nets[2 * i + 1];
      const int64_t now = ++held_[net];
      if (now == 1) transfer += net_cost[net];
      if (now == net_size[net]) transfer -= net_cost[net];
    }
    return transfer;
  }

  void release(int64_t v) {
    for (int64_t i = nets_start[v]; i < nets_start[v + 1]; ++i) --held_[class_nets[2 * i + 1]];
  }

  void take(double* row, const double* before, const Difference& s) const {
    if (before[row_size_ - 1] > limit) return;  // nothing can hold I'
    const double load = s.accelerator + s.transfer;
    if (s.on_accelerator && load <= limit)
      for (int64_t i = width_; i < row_size_; ++i) row[i] = std::min(row[i], std::max(before[i - width_], load));
    if (num_cpus > 0 && s.cpu <= limit)
      for (int64_t i = 1; i < row_size_; ++i) row[i] = std::min(row[i], std::max(before[i - 1], s.cpu));
  }

  // "exactly" becomes "at most"
  void accumulate(double* row) const {
    for (int64_t a = 0; a <= num_accelerators; ++a) {
      row[a * width_] = kInfinity;
      for (int64_t c = 1; c < width_; ++c) {
        double& value = row[a * width_ + c];
        if (a) value = std::min(value, row[(a - 1) * width_ + c]);
        value = std::min(value, row[a * width_ + c - 1]);
      }
    }
  }
};

Tensor placement_best_loads(const Tensor& covers, const Tensor& class_cost, const Tensor& class_nets,
                            const Tensor& net_cost, const Tensor& net_size, int64_t num_ideals,
                            int64_t num_accelerators, int64_t num_cpus, double memory, double limit, double seconds) {
  STD_TORCH_CHECK(num_ideals > 0 && num_accelerators >= 0 && num_cpus >= 0,
                  "placement_best_loads: num_ideals must be above 0, numbers of devices 0 or more");
  Walk walk;
  const int64_t num_covers = covers.numel() / 3, num_pins = class_nets.numel() / 2;
  walk.num_ideals = num_ideals;
  walk.num_classes = class_cost.numel() / 4;
  walk.num_nets = net_cost.numel();
  walk.covers = read<int64_t>("covers", covers, ScalarType::Long, 3 * num_covers);
  walk.class_nets = read<int64_t>("class_nets", class_nets, ScalarType::Long, 2 * num_pins);
  walk.cost = read<double>("class_cost", class_cost, ScalarType::Double, 4 * walk.num_classes);
  walk.net_cost = read<double>("net_cost", net_cost, ScalarType::Double, walk.num_nets);
  walk.net_size = read<int64_t>("net_size", net_size, ScalarType::Long, walk.num_nets);
  const int64_t cover_bounds[] = {num_ideals, walk.num_classes, num_ideals}, pin_bounds[] = {0, walk.num_nets};
  walk.covers_start = ranges("covers", walk.covers, num_covers, 3, num_ideals, cover_bounds);
  walk.nets_start = ranges("class_nets", walk.class_nets, num_pins, 2, walk.num_classes, pin_bounds);
  for (int64_t i = 0; i < num_covers; ++i)
    STD_TORCH_CHECK(walk.covers[3 * i + 2] < walk.covers[3 * i],
                    "placement_best_loads: covers must lead to smaller ideals");
  walk.num_accelerators = num_accelerators;
  walk.num_cpus = num_cpus;
  walk.memory = memory;
  walk.limit = limit;
  walk.deadline = std::chrono::steady_clock::now() +
                  std::chrono::microseconds(static_cast<int64_t>(1e6 * std::min(std::max(seconds, 0.0), 1e9)));
  Tensor out = torch::stable::empty({num_ideals, num_accelerators + 1, num_cpus + 1}, ScalarType::Double);
  if (walk.run(static_cast<double*>(out.mutable_data_ptr()))) return out;
  return torch::stable::empty({0, num_accelerators + 1, num_cpus + 1}, ScalarType::Double);
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def(
      "placement_best_loads(Tensor covers, Tensor class_cost, Tensor class_nets, Tensor net_cost, Tensor net_size, "
      "int num_ideals, int num_accelerators, int num_cpus, float memory, float limit, float seconds) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("placement_best_loads", TORCH_BOX(&placement_best_loads));
}
