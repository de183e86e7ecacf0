// The gradients of gates and ups, compared with those in double.

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>

#include "layer/activation/silu.h"
#include "tests/unit/check.h"

namespace jax_ep::silu {
namespace {

// Of min(x, limit); half of it where both are equal.
double Passed(double x, double limit) { return x < limit ? 1 : x == limit ? 0.5 : 0; }

void CheckGradients(const Activation& activation, float gate, float up) {
  constexpr float kOfValue = -0.75f;
  constexpr double kTiny = 1e-34;  // sigmoids below e^-87 are zero
  const double alpha = activation.is_clamped ? activation.alpha : 1;
  const double limit =
      activation.is_clamped ? activation.limit : std::numeric_limits<double>::infinity();
  const double clamped = std::min<double>(gate, limit);
  const double factor = std::clamp<double>(up, -limit, limit) + (activation.is_clamped ? 1 : 0);
  const double sigmoid = 1 / (1 + std::exp(-alpha * clamped));
  const double slope = sigmoid + alpha * clamped * sigmoid * (1 - sigmoid);
  const double of_gate = kOfValue * factor * slope * Passed(gate, limit);
  const double of_up = kOfValue * clamped * sigmoid * Passed(up, limit) * Passed(-up, limit);
  // Of e^-z of a rounded z. The terms of the slope may cancel each other.
  const double size = 1 + std::abs(alpha * clamped), error = 1e-6 * size;
  const double gate_error = error * std::abs(kOfValue * factor) * sigmoid * size;
  const GateGradients got = activation.Gradients(gate, up, kOfValue);
  const bool are_near = std::abs(got.gate - of_gate) <= gate_error + kTiny &&
                        std::abs(got.up - of_up) <= error * std::abs(of_up) + kTiny;
  if (!are_near) {
    std::cerr << "gate " << gate << ", up " << up << ": got " << got.gate << " and " << got.up
              << ", expected " << of_gate << " and " << of_up << std::endl;
  }
  CHECK_EQ(are_near, true);
}

TEST(GradientsOfGatesAndUpsAreNearThoseInDouble) {
  for (const Activation& activation :
       {Activation{}, Activation{true, 1.702f, 7.0f}, Activation{true, -1.0f, 0.5f}}) {
    for (int i = -3200; i <= 3200; ++i) {
      for (const float up : {-30.0f, -7.0f, -0.5f, -0.25f, 0.0f, 1.5f, 7.0f, 8.0f}) {
        CheckGradients(activation, static_cast<float>(i) / 32, up);
      }
    }
  }
}

TEST(GradientsOfNanAreNan) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation& activation : {Activation{}, Activation{true, 1.702f, 7.0f}}) {
    CHECK_EQ(std::isnan(activation.Gradients(kNan, 1, 1).gate), true);
    CHECK_EQ(std::isnan(activation.Gradients(1, kNan, 1).gate), true);
    CHECK_EQ(std::isnan(activation.Gradients(1, 1, kNan).up), true);
  }
}

}  // namespace
}  // namespace jax_ep::silu
