// Functions of one number.
#pragma once

#include "device.cuh"

namespace hybridpar {

HYBRIDPAR_DEVICE float exponential(float x) { return power_of_two(x * 1.4426950408889634f); }
HYBRIDPAR_DEVICE double exponential(double x) { return exp(x); }

template <class W>
struct Sigmoid {
  W value, rest;  // 1 / (1 + e^-x) and 1 less that, which no cancellation makes inexact
};

template <class W>
HYBRIDPAR_DEVICE Sigmoid<W> sigmoid(W x) {
  const W power = exponential(-larger(W(-80), x));  // below, nothing changes, and the product stays a number
  const W value = reciprocal(W(1) + power);
  return {value, value * power};
}

// gelu(x) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)   (arXiv 1606.08415)
template <class W>
struct Gelu {
  static constexpr W kSlope = W(2 * 0.7978845608028653559), kCubic = W(2 * 0.7978845608028653559 * 0.044715);

  HYBRIDPAR_DEVICE_MEMBER static W value(W x) { return x * sigmoid(x * (kCubic * x * x + kSlope)).value; }
  HYBRIDPAR_DEVICE_MEMBER static W derivative(W x) {
    const W square = x * x;
    const Sigmoid<W> s = sigmoid(x * (kCubic * square + kSlope));
    return x * s.value * s.rest * (W(3) * kCubic * square + kSlope) + s.value;
  }
};

// silu(x) = x * sigmoid(x)
template <class W>
struct Silu {
  W value, derivative;

  HYBRIDPAR_DEVICE_MEMBER explicit Silu(W x) {
    const Sigmoid<W> s = sigmoid(x);
    value = x * s.value;
    derivative = value * s.rest + s.value;
  }
};

}  // namespace hybridpar
