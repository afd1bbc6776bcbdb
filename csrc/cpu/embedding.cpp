// A rank's rows of an embedding table: looks ids up, and adds gradients to the rows.

#include "rows.h"

namespace hybridpar {
namespace {

template <class T, class G>
HYBRIDPAR_INLINE void add_any(G* to, const T* from, int64_t n) {
  each(n, [=](int64_t i, int) { to[i] = narrow<G>(wide(to[i]) + static_cast<Wide<G>>(wide(from[i]))); });
}

#define HYBRIDPAR_ADD(T, G) \
  HYBRIDPAR_CLONES void add_row(G* to, const T* from, int64_t n) { add_any(to, from, n); }
#define HYBRIDPAR_ADD_OWN(T) HYBRIDPAR_ADD(T, T)
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_ADD_OWN)
HYBRIDPAR_ADD(BFloat16, float)
HYBRIDPAR_ADD(Half, float)

void check(const char* op, const Tensor& ids, const Tensor& table) {
  check_contiguous(op, "ids", ids);
  check_contiguous(op, "the table", table);
  STD_TORCH_CHECK(table.dim() == 2 && ids.scalar_type() == ScalarType::Long, op,
                  ": needs ids int64 and a table [rows, h]");
}

// ids [..], weight [rows, h] -> [.., h]: weight[id - start], zero where that is no row
Tensor embedding(const Tensor& ids, const Tensor& weight, int64_t start) {
  check("embedding", ids, weight);
  const int64_t rows = weight.size(0), h = weight.size(1), count = ids.numel();
  std::vector<int64_t> shape(ids.sizes().begin(), ids.sizes().end());
  shape.push_back(h);
  Tensor out = make(shape, weight.scalar_type());
  const auto* id = data<int64_t>(ids);
  by_type("embedding", weight, [&](auto element) {
    using T = decltype(element);
    const T* from = data<T>(weight);
    T* to = data<T>(out);
    over_rows(count, h, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = id[i] - start;
        if (row >= 0 && row < rows)
          std::memcpy(to + i * h, from + row * h, h * sizeof(T));
        else
          std::memset(static_cast<void*>(to + i * h), 0, h * sizeof(T));
      }
    });
  });
  return out;
}

// gradient [rows, h] (+)= dy [.., h] by ids: every row's in the order of ids, whatever the threads, which share the rows out
void embedding_backward_(const Tensor& gradient, const Tensor& dy, const Tensor& ids, int64_t start, bool overwrite) {
  check("embedding_backward_", ids, gradient);
  check_contiguous("embedding_backward_", "dy", dy);
  const int64_t rows = gradient.size(0), h = gradient.size(1), count = ids.numel();
  STD_TORCH_CHECK(dy.numel() == count * h, "embedding_backward_: dy must be [.., h], with a row for each id");
  STD_TORCH_CHECK(gradient.scalar_type() == dy.scalar_type() || gradient.scalar_type() == wide_type(dy),
                  "embedding_backward_: the gradient must have dy's type or that of its arithmetic");
  const auto* id = data<int64_t>(ids);
  const auto add = [&](auto element, auto sum) {
    using T = decltype(element);
    using G = decltype(sum);
    const T* from = data<T>(dy);
    G* to = data<G>(gradient);
    const int64_t work = count * h + (overwrite ? rows * h : 0);
    const int64_t grain = std::max<int64_t>(1, rows * kGrain / std::max<int64_t>(1, work));
    torch::stable::parallel_for(0, rows, grain, [=](int64_t begin, int64_t end) {
      if (overwrite) std::memset(static_cast<void*>(to + begin * h), 0, (end - begin) * h * sizeof(G));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = id[i] - start;
        if (row >= begin && row < end) add_row(to + row * h, from + i * h, h);
      }
    });
  };
  by_type("embedding_backward_", dy, [&](auto element) {
    using T = decltype(element);
    if (gradient.scalar_type() == dy.scalar_type())
      add(element, element);
    else if constexpr (sizeof(T) == 2)
      add(element, float());
  });
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def("embedding(Tensor ids, Tensor weight, SymInt start) -> Tensor");
  library.def(
      "embedding_backward_(Tensor(a!) gradient, Tensor dy, Tensor ids, SymInt start, bool overwrite) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("embedding", TORCH_BOX(&embedding));
  library.impl("embedding_backward_", TORCH_BOX(&embedding_backward_));
}
