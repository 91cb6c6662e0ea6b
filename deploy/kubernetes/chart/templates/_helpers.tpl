{{/* Labels of all objects. */}}
{{- define "vgpu.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The image of both containers. */}}
{{- define "vgpu.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* On which nodes the pods run, and how. */}}
{{- define "vgpu.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What Prometheus reads of each executor: an item of endpoints or podMetricsEndpoints. */}}
{{- define "vgpu.endpoint" -}}
- port: metrics
  path: /metrics
  {{- with .Values.metrics.monitor.interval }}
  interval: {{ . }}
  {{- end }}
  relabelings:
    - targetLabel: job
      replacement: vgpu
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: instance
{{- end }}
