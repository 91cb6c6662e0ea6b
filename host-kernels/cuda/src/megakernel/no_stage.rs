//! Why launches are outside megakernels.

/// Why a launch is not a stage of a megakernel. The log groups launches by the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum NoStage {
    #[error("a megakernel takes up to 8 tokens")]
    TooManyTokens,
    #[error("its grid is too large for a stage")]
    GridTooLarge,
    #[error("its kernel has no stage")]
    OtherKernel,
    #[error("its parameters are larger than those of a stage")]
    ParamsTooLarge,
    #[error("its parameters are not those of its stage")]
    OtherParams,
    #[error("its result depends on the order of its blocks")]
    DependsOnOrder,
    #[error("no stage multiplies weights of this type")]
    WeightType,
    #[error("no stage reads quantised rows")]
    QuantisedRows,
    #[error("no stage uses classified mask tiles")]
    MaskTiles,
    /// The launch has a stage, and is in no megakernel.
    #[error("the blocks of a cooperative launch do not fit on the device")]
    NoRoom,
    /// The launch has a stage, and is in no megakernel.
    #[error("too few consecutive launches have a stage")]
    TooFewStages,
}
