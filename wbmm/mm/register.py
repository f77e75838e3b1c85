"""Makes the package known to mmengine, in the root registries: MMSegmentation and MMDetection both see them.

custom_imports = dict(imports=["wbmm.mm.register"], allow_failed_imports=False)
"""

from mmengine.fileio import register_backend
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS

from .backbone import WBMMBackbone
from .hooks import BroadcastBuffersHook, LabelRangeHook
from .layer_decay import LayerDecayConstructor
from .storage import ATOMIC, AtomicBackend
from .timm_backbone import TimmBackbone

MODELS.register_module(module=WBMMBackbone)
MODELS.register_module(module=TimmBackbone)
OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=LayerDecayConstructor, name="WBMMLayerDecay")
HOOKS.register_module(module=LabelRangeHook)
HOOKS.register_module(module=BroadcastBuffersHook)
register_backend(ATOMIC, AtomicBackend)
