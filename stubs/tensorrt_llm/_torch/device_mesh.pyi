from typing import Any, ClassVar

class DeviceMeshTopologyImpl:
    device_mesh: ClassVar[Any]
    tp_mesh: ClassVar[Any]
