// Elementwise passes over many tensors at once: a step of Adam, a step along given directions, sums of squares.
//
// Every pass reads the old weights and writes the new ones, elsewhere or in place, and with them the working copy that micro-batches
// run on. Elements are computed alone, so where one lies in its tensor, and with what vectors, changes no bit of it.

#include "rows.h"

namespace hybridpar {
namespace {

constexpr int64_t kPiece = 1 << 15;  // elements that a thread takes at a time

using Tensors = std::vector<Tensor>;

struct Piece {
  size_t tensor;
  int64_t begin, end;
};

// All elements of all tensors, in pieces that begin at multiples of kPiece in their tensor.
std::vector<Piece> pieces_of(const Tensors& tensors) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (int64_t begin = 0, n = tensors[i].numel(); begin < n; begin += kPiece)
      pieces.push_back({i, begin, std::min(n, begin + kPiece)});
  return pieces;
}

template <class F>
void over_pieces(const std::vector<Piece>& pieces, const F& f) {
  torch::stable::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(pieces[i]);
  });
}

// W: the type of the master copy, moments and gradients; T: that of the working copy. A piece of them.
template <class T>
struct Weights {
  const Wide<T>* old;
  Wide<T>* fresh;  // may be old
  T* working;  // or null
  bool predicted;
};

// Writes fresh(i, old) as the new weights, and what follows of it as the working copy. `streams`: what `fresh` goes through besides.
template <class T, class F, class... S>
HYBRIDPAR_INLINE void write(const Weights<T>& to, int64_t n, const F& fresh, const S*... streams) {
  using W = Wide<T>;
  const W* old = to.old;
  W* out = to.fresh;
  T* working = to.working;
  const bool predicted = to.predicted;
  const auto copy = [=](W before, W after) __attribute__((always_inline)) {
    return narrow<T>(predicted ? W(2) * after - before : after);  // twice is exact: one rounding
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    W before[kLanes], after[kLanes];
    (prefetch(ahead(streams + i)), ..., prefetch(ahead(old + i)));
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      before[lane] = old[i + lane];
      after[lane] = fresh(i + lane, before[lane]);
    }
    if (out == old) std::memcpy(out + i, after, sizeof after);
    else store(out + i, after);
    if (working == nullptr) continue;
    T copies[kLanes];
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) copies[lane] = copy(before[lane], after[lane]);
    store(working + i, copies);
  }
  for (; i < n; ++i) {
    const W before = old[i], after = fresh(i, before);
    out[i] = after;
    if (working != nullptr) working[i] = copy(before, after);
  }
  stored();
}

// What a step of Adam does to every element:
//   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  g = scale * gradient
//   x = keep x - (of_mean m + of_gradient g) / (sqrt(v) / root + eps)
template <class W>
struct Rates {
  W scale, rest1, beta2, rest2, of_mean, of_gradient, inverse_root, eps, keep;
};

template <class T>
struct AdamPiece {
  using W = Wide<T>;
  Weights<T> weights;
  const W* gradient;
  W *mean, *square;
  Rates<W> rates;
  int64_t n;
};

template <class T>
HYBRIDPAR_INLINE void adam_any(const AdamPiece<T>& a) {
  using W = Wide<T>;
  const W* gradient = a.gradient;
  W *mean = a.mean, *square = a.square;
  const Rates<W> r = a.rates;
  const auto moments = [=](int64_t i, W& m, W& g) __attribute__((always_inline)) {
    g = gradient[i] * r.scale;
    m = mean[i];
    m += r.rest1 * (g - m);
    const W v = r.beta2 * square[i] + r.rest2 * g * g;
    mean[i] = m;
    square[i] = v;
    return std::sqrt(v) * r.inverse_root + r.eps;
  };
  if (r.of_gradient == W(0)) {
    write(a.weights, a.n, [=](int64_t i, W x) __attribute__((always_inline)) {
      W m, g;
      const W root = moments(i, m, g);
      return r.keep * x - r.of_mean * (m / root);
    }, gradient, mean, square);
  } else {
    write(a.weights, a.n, [=](int64_t i, W x) __attribute__((always_inline)) {
      W m, g;
      const W root = moments(i, m, g);
      return r.keep * x - (r.of_mean * m + r.of_gradient * g) / root;
    }, gradient, mean, square);
  }
}

template <class T>
struct MovePiece {
  using W = Wide<T>;
  Weights<T> weights;
  const W* direction;
  W keep, factor;
  int64_t n;
};

template <class T>
HYBRIDPAR_INLINE void move_any(const MovePiece<T>& a) {
  using W = Wide<T>;
  const W* direction = a.direction;
  const W keep = a.keep, factor = a.factor;
  write(a.weights, a.n, [=](int64_t i, W x) __attribute__((always_inline)) {
    return keep * x + factor * direction[i];
  }, direction);
}

template <class T>
struct ExtrapolatePiece {
  using W = Wide<T>;
  const W* old;
  W *fresh, *previous;
  T* working;
  int64_t n;
};

template <class T>
HYBRIDPAR_INLINE void extrapolate_any(const ExtrapolatePiece<T>& a) {
  using W = Wide<T>;
  const W* old = a.old;
  W *fresh = a.fresh, *previous = a.previous;
  T* working = a.working;
  each(a.n, [=](int64_t i, int) {
    const W update = fresh[i] - old[i], x = fresh[i] + update - previous[i];
    previous[i] = update;
    fresh[i] = x;
  }, ahead(old), ahead(fresh), ahead(previous));
  if (working != nullptr) each(a.n, [=](int64_t i, int) { working[i] = narrow<T>(fresh[i]); });
}

// In double whatever the type: the square of no float overflows there.
template <class T>
HYBRIDPAR_INLINE double squares_any(const T* x, int64_t n) {
  double lanes[kLanes] = {};
  each(n, [x, &lanes](int64_t i, int lane) {
    const double value = static_cast<double>(wide(x[i]));
    lanes[lane] += value * value;
  }, x + 4096 / sizeof(T));  // one array: farther ahead
  return sum_lanes(lanes);
}

#define HYBRIDPAR_OPTIMIZER(T)                                                                \
  HYBRIDPAR_CLONES void adam_piece(const AdamPiece<T>& a) { adam_any(a); }                    \
  HYBRIDPAR_CLONES void move_piece(const MovePiece<T>& a) { move_any(a); }                    \
  HYBRIDPAR_CLONES void extrapolate_piece(const ExtrapolatePiece<T>& a) { extrapolate_any(a); } \
  HYBRIDPAR_CLONES double squares_piece(const T* x, int64_t n) { return squares_any(x, n); }
HYBRIDPAR_EACH_TYPE(HYBRIDPAR_OPTIMIZER)

// As many tensors as `like`, of one type each, each with the elements of its own in `like`, without gaps.
void check_list(const char* op, const char* name, const Tensors& tensors, const Tensors& like, ScalarType type) {
  STD_TORCH_CHECK(tensors.size() == like.size(), op, ": ", name, " must be as many as old");
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_contiguous(op, name, tensors[i]);
    STD_TORCH_CHECK(tensors[i].numel() == like[i].numel(), op, ": ", name, "[", i, "] has not the elements of old");
    STD_TORCH_CHECK(tensors[i].scalar_type() == type, op, ": ", name, "[", i, "] has another type");
  }
}

// The type of the working copy; that of the weights where there is none. Checks both.
const Tensor& check_weights(const char* op, const Tensors& old, const Tensors& fresh, const Tensors& working) {
  const ScalarType type = old[0].scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, op, ": needs float32 or float64 weights");
  check_list(op, "old", old, old, type);
  check_list(op, "new", fresh, old, type);
  if (working.empty()) return old[0];
  STD_TORCH_CHECK(wide_type(working[0]) == type, op, ": the working copy is wider than the weights");
  check_list(op, "working", working, old, working[0].scalar_type());
  return working[0];
}

template <class T>
Weights<T> weights_at(const Piece& p, const Tensors& old, const Tensors& fresh, const Tensors& working, bool predicted) {
  return {data<Wide<T>>(old[p.tensor]) + p.begin, data<Wide<T>>(fresh[p.tensor]) + p.begin,
          working.empty() ? nullptr : data<T>(working[p.tensor]) + p.begin, predicted};
}

// See hybridpar/ops/update.py. numbers: scale, 1 - beta1, beta2, of_mean, of_gradient, 1 / root, eps. `fresh` may be `old`, or the
// gradients.
void adam_(Tensors old, Tensors gradients, Tensors means, Tensors squares, Tensors fresh, Tensors working,
           std::vector<double> keeps, std::vector<double> numbers, bool predicted) {
  if (old.empty()) return;
  const Tensor& like = check_weights("adam_", old, fresh, working);
  const ScalarType type = old[0].scalar_type();
  check_list("adam_", "gradients", gradients, old, type);
  check_list("adam_", "means", means, old, type);
  check_list("adam_", "squares", squares, old, type);
  STD_TORCH_CHECK(keeps.size() == old.size() && numbers.size() == 7, "adam_: needs a keep for each tensor, 7 numbers");
  const auto pieces = pieces_of(old);
  by_type("adam_", like, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    const auto n = [&](int i) { return static_cast<W>(numbers[i]); };
    const Rates<W> rates{n(0), n(1), n(2), static_cast<W>(1 - numbers[2]), n(3), n(4), n(5), n(6), W(1)};
    over_pieces(pieces, [&](const Piece& p) {
      AdamPiece<T> a{weights_at<T>(p, old, fresh, working, predicted), data<W>(gradients[p.tensor]) + p.begin,
                     data<W>(means[p.tensor]) + p.begin, data<W>(squares[p.tensor]) + p.begin, rates, p.end - p.begin};
      a.rates.keep = static_cast<W>(keeps[p.tensor]);
      adam_piece(a);
    });
  });
}

// new = keep * old + factor * direction, with a keep and a factor for each tensor
void move_(Tensors old, Tensors directions, Tensors fresh, Tensors working, std::vector<double> keeps,
           std::vector<double> factors, bool predicted) {
  if (old.empty()) return;
  const Tensor& like = check_weights("move_", old, fresh, working);
  check_list("move_", "directions", directions, old, old[0].scalar_type());
  STD_TORCH_CHECK(keeps.size() == old.size() && factors.size() == old.size(), "move_: needs a keep and a factor for each");
  const auto pieces = pieces_of(old);
  by_type("move_", like, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    over_pieces(pieces, [&](const Piece& p) {
      move_piece(MovePiece<T>{weights_at<T>(p, old, fresh, working, predicted),
                              data<W>(directions[p.tensor]) + p.begin, static_cast<W>(keeps[p.tensor]),
                              static_cast<W>(factors[p.tensor]), p.end - p.begin});
    });
  });
}

// u = new - old; new += u - previous; previous = u
void extrapolate_(Tensors old, Tensors fresh, Tensors previous, Tensors working) {
  if (old.empty()) return;
  const Tensor& like = check_weights("extrapolate_", old, fresh, working);
  check_list("extrapolate_", "previous", previous, old, old[0].scalar_type());
  const auto pieces = pieces_of(old);
  by_type("extrapolate_", like, [&](auto element) {
    using T = decltype(element);
    using W = Wide<T>;
    over_pieces(pieces, [&](const Piece& p) {
      const auto at = weights_at<T>(p, old, fresh, working, false);
      extrapolate_piece(ExtrapolatePiece<T>{at.old, at.fresh, data<W>(previous[p.tensor]) + p.begin, at.working,
                                            p.end - p.begin});
    });
  });
}

// -> float64 [number of tensors]. Pieces are summed apart and added in order, whatever the threads.
Tensor sum_squares(Tensors tensors) {
  Tensor out = make({static_cast<int64_t>(tensors.size())}, ScalarType::Double);
  auto* to = data<double>(out);
  std::fill(to, to + tensors.size(), 0.0);
  for (const Tensor& x : tensors) check_contiguous("sum_squares", "every tensor", x);
  const auto pieces = pieces_of(tensors);
  std::vector<double> sums(pieces.size());
  over_pieces(pieces, [&](const Piece& p) {
    by_type("sum_squares", tensors[p.tensor], [&](auto element) {
      using T = decltype(element);
      sums[&p - pieces.data()] = squares_piece(data<T>(tensors[p.tensor]) + p.begin, p.end - p.begin);
    });
  });
  for (size_t i = 0; i < pieces.size(); ++i) to[pieces[i].tensor] += sums[i];
  return out;
}

}  // namespace
}  // namespace hybridpar

using namespace hybridpar;

STABLE_TORCH_LIBRARY_FRAGMENT(hybridpar, library) {
  library.def(
      "adam_(Tensor[] old, Tensor[] gradients, Tensor(a!)[] means, Tensor(b!)[] squares, Tensor(c!)[] new, "
      "Tensor(d!)[] working, float[] keeps, float[] numbers, bool predicted) -> ()");
  library.def(
      "move_(Tensor[] old, Tensor[] directions, Tensor(a!)[] new, Tensor(b!)[] working, float[] keeps, "
      "float[] factors, bool predicted) -> ()");
  library.def(
      "extrapolate_(Tensor[] old, Tensor(a!)[] new, Tensor(b!)[] previous, Tensor(c!)[] working) -> ()");
  library.def("sum_squares(Tensor[] tensors) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hybridpar, CPU, library) {
  library.impl("adam_", TORCH_BOX(&adam_));
  library.impl("move_", TORCH_BOX(&move_));
  library.impl("extrapolate_", TORCH_BOX(&extrapolate_));
  library.impl("sum_squares", TORCH_BOX(&sum_squares));
}
