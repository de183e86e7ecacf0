#include "cpu/call_site.h"

#include <memory>
#include <string>

#include "cpu/handlers.h"

namespace jax_ep {

ffi::TypeId CallSite::id = {};

namespace {

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite(EpConfig config, Weighting weighting,
                                                     bool reduce, bool has_residual) {
  if (config.n_ranks < 1 || config.n_experts < 1 || config.n_experts % config.n_ranks != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "n_experts must be a multiple of n_ranks; got n_experts=" +
        std::to_string(config.n_experts) + ", n_ranks=" + std::to_string(config.n_ranks)));
  }
  if (config.row_alignment < 1) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("row_alignment must be positive; got " +
                                                       std::to_string(config.row_alignment)));
  }
  auto site = std::make_unique<CallSite>(
      CallSite{config, weighting, reduce, has_residual, std::string(config.group),
               std::string(config.token_format), std::string(config.scales_layout),
               std::string(config.combine_dtype)});
  site->config.group = site->group;
  site->config.token_format = site->token_format;
  site->config.scales_layout = site->scales_layout;
  site->config.combine_dtype = site->combine_dtype;
  return site;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(HostInstantiate, MakeCallSite,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<EpConfig>("ep")
                                  .Attr<Weighting>("weighting")
                                  .Attr<bool>("reduce")
                                  .Attr<bool>("has_residual"));

}  // namespace jax_ep
